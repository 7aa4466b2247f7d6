"""Random values that nobody without a key can foresee, the same for the same key on any day: SHAKE-256."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def uniform(key: bytes, count: int) -> NDArray[np.floating[Any]]:
    """Values inside (0, 1)."""
    bits = np.frombuffer(hashlib.shake_256(key).digest(count * 8), dtype="<u8") >> np.uint64(11)
    return (bits + 0.5) * 2.0**-53


def normal(key: bytes, count: int) -> Tensor:
    """Normal values (float64), by Box and Muller."""
    pairs = -(-count // 2)
    flat = uniform(key, 2 * pairs)
    radius, angle = np.sqrt(-2 * np.log(flat[:pairs])), 2 * np.pi * flat[pairs:]
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count])
