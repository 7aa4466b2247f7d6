"""Randomness is a function of its names."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from consilium.randomness import derive, numpy_generator, torch_generator


def test_the_same_names_give_the_same_numbers() -> None:
    assert derive(0, "hk", 3, "batches") == derive(0, "hk", 3, "batches")
    first, second = (numpy_generator(1, "a").integers(10**9, size=4).tolist() for _ in range(2))
    assert first == second
    assert torch_generator(1, "a").initial_seed() == derive(1, "a")


def test_a_seed_is_a_known_number() -> None:
    """SHA-256 of "0␟hk␟3", its first eight bytes, without the sign bit: the same on every machine and version."""
    assert derive(0, "hk", 3) == 6_810_628_192_232_277_532


@pytest.mark.parametrize(
    "names", [(1, "hk", 3), (0, "bin", 3), (0, "hk", 4), (0, "hk"), (0, "hk3"), (0, 3, "hk"), (0, "hk", 3, "")]
)
def test_other_names_give_other_numbers(names: tuple[int, ...]) -> None:
    assert derive(*names) != derive(0, "hk", 3)


def test_seeds_fit_every_generator() -> None:
    seeds = [derive(0, i) for i in range(2000)]
    assert len(set(seeds)) == 2000
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


def test_the_process_does_not_matter() -> None:
    """Python salts its own hash in every process; a derived seed must not depend on it."""
    code = "from consilium.randomness import derive; print(derive(7, 'hk', 'drop peers'))"
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert int(done.stdout) == derive(7, "hk", "drop peers")
