"""What a round costs beside training."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.measuring import Interleaved, Laps, Measured, load
from benchmarks.small import small_study, write_small
from consilium import simulation
from consilium.machine import default_workers
from consilium.weights import Weights
from consilium.wires.processes import Pool

SITES = 6
ROUNDS = 3  # per repeat


class ThroughFiles:
    """Every site's weights through a safetensors file, once down and once up."""

    def __init__(self, weights: Weights, folder: Path) -> None:
        self._weights, self._folder = weights, folder
        folder.mkdir(exist_ok=True)

    pids: Sequence[int] = ()

    def restart(self) -> None:
        """Nothing is kept from round to round."""

    def round(self, index: int) -> None:
        for site in range(SITES):
            got = self._through(dict(self._weights), f"{site}.down")
            self._through(got, f"{site}.up")

    def _through(self, tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        """The library maps what it loads, so writing alone moves bytes: the cheapest baseline there is."""
        save_file(tensors, self._folder / name)
        loaded: dict[str, Tensor] = load_file(self._folder / name)
        return loaded


def empty_rounds(folder: Path, repeats: int) -> list[Measured]:
    """Six sites, 30 MB of weights, a method that sends them back untouched."""
    data = write_small(folder / "small")
    study = small_study(data, "benchmarks.nothing:Echo", SITES, rounds=1 + ROUNDS)
    runs = folder / "empty-runs"
    files = ThroughFiles(study.task.initial(), folder / "through")
    with Pool(default_workers()) as pool:

        def run(laps: Laps) -> None:
            shutil.rmtree(runs, ignore_errors=True)
            simulation.run(study, runs, pool=pool, watch=laps)

        seen = Interleaved.of(run, [process.pid for process in pool.processes], files, ROUNDS, repeats)
    ours, theirs = seen.seconds
    what = f"a round of {SITES} sites that train nothing, 30 MB of weights"
    facts = {"in processor time": seen.ratio("chain"), "load": load()}
    return [Measured("overhead", what, ours, "through safetensors", theirs, "s", seen.ratio(), 3.0, facts=facts)]
