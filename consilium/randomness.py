"""Randomness derived from names: the same names give the same numbers in every process."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive(seed: int, *names: object) -> int:
    """A 63-bit seed from a study's seed and the names of its purpose."""
    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def torch_generator(seed: int, *names: object) -> torch.Generator:
    import torch  # late: phantoms and partitions need no torch

    return torch.Generator().manual_seed(derive(seed, *names))


def numpy_generator(seed: int, *names: object) -> np.random.Generator:
    return np.random.default_rng(derive(seed, *names))
