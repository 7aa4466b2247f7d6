"""Federated training against plain PyTorch: the same steps, the same batches, the same processes and threads."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.measuring import Clock, Interleaved, Laps, Measured, Rival, load, median_ratio
from benchmarks.plain import BareLoop, FirstTry, ThreeLoops
from consilium import simulation
from consilium.data.phantoms import write_phantom
from consilium.demo import CASES, SIZE
from consilium.machine import default_workers
from consilium.ready_studies import folder_of_studies
from consilium.study import Study
from consilium.study_reading import load_study
from consilium.weights import Weights
from consilium.wires.processes import Pool

ROUNDS = 10  # of the demo, per repeat
LONG = 11.0  # seconds a long round should train
AGREE = 1e-5  # largest difference of a weight between our run and the bare loop's


def at_demo_sizes(folder: Path, repeats: int) -> list[Measured]:
    """Six retina phantom sites, 440 cases of 64 × 64, the demo's U-Net, batches of 8."""
    study = demo_study(folder, epochs=1, rounds=1 + ROUNDS)
    return [_against_bare("demo", "a round of the demo's FedAvg", study, folder, repeats, 1.10)]


def long_rounds(folder: Path, repeats: int) -> list[Measured]:
    """The same federation with so many epochs that a round trains for more than ten seconds."""
    study = demo_study(folder, epochs=_epochs(folder), rounds=2)
    return [_against_bare("long", f"a round of {study.local.epochs} epochs", study, folder, repeats, 1.03)]


def three_models(folder: Path, repeats: int) -> list[Measured]:
    """FedSM trains a global model, a personal one and a selector on the same batches; a round takes ten seconds."""
    epochs = _epochs(folder, three=True)
    how = {"method.confidence": 0.5}
    study = demo_study(folder, epochs, 2, "demo_fedsm.toml", how)
    what = f"a round of FedSM, three models, {epochs} epochs"
    return [_against_bare("fedsm", what, study, folder, repeats, 1.05, "three bare loops")]


def against_first_try(folder: Path, repeats: int) -> list[Measured]:
    """The demo against one process with its default threads and memory layout, sites in turn."""
    study = demo_study(folder, epochs=1, rounds=1 + ROUNDS)
    with FirstTry(_file(study, folder)) as first:
        seen, _ = _compete(study, folder, repeats, first)
    ours, theirs = seen.seconds
    what, other = "a round of the demo's FedAvg", "one process, sites in turn"
    gain = median_ratio(seen.theirs, seen.ours)
    return [Measured("first-try", what, ours, other, theirs, "s", gain, 1.30, gain=True, facts={"load": load()})]


def _against_bare(
    name: str, what: str, study: Study, folder: Path, repeats: int, limit: float, against: str = "a bare loop"
) -> Measured:
    with BareLoop(_file(study, folder), default_workers()) as bare:
        rival = ThreeLoops(bare) if study.method_name == "fedsm" else bare
        seen, weights = _compete(study, folder, repeats, rival)
        theirs = bare.weights(study)
    apart = max(float((weights[f"global/{key}"] - tensor).abs().max()) for key, tensor in theirs.items())
    if not apart <= AGREE:
        raise RuntimeError(f"the bare loop ended {apart:.2g} away from our weights: not the same work was compared.")
    facts = {"in processor time": seen.ratio("chain"), "weights differ by": apart, "load": load()}
    ours, bare_seconds = seen.seconds
    return Measured(name, what, ours, against, bare_seconds, "s", seen.ratio(), limit, facts=facts)


def demo_study(
    folder: Path, epochs: int, rounds: int, file: str = "demo_fedavg.toml", more: Mapping[str, Any] | None = None
) -> Study:
    data = folder / "retina"
    if not data.exists():
        write_phantom("retina", data, CASES, SIZE, 0)
    changes = {
        "data.federation": f'"{data}"',
        "study.rounds": rounds,
        "study.score_every": rounds,
        "local.epochs": epochs,
        "local.optimizer_state": '"fresh"',  # as the bare loops do it
        **(more or {}),
    }
    return load_study(folder_of_studies() / file, [f"{key}={value}" for key, value in changes.items()])


def _file(study: Study, folder: Path) -> Path:
    path = folder / "study.toml"
    path.write_text(study.to_toml())
    return path


def _epochs(folder: Path, three: bool = False) -> int:
    """As many as fill a long round on this machine now."""
    study = demo_study(folder, epochs=4, rounds=1)
    with BareLoop(_file(study, folder), default_workers()) as bare:
        loops = ThreeLoops(bare) if three else bare
        loops.round(0)
        clock = Clock()
        loops.round(1)
        return math.ceil(4 * LONG / clock.stop().seconds)


def _compete(study: Study, folder: Path, repeats: int, rival: Rival) -> tuple[Interleaved, Weights]:
    """The study and its rival in turn; also the weights of our last run."""
    runs = folder / "runs"
    with Pool(default_workers()) as pool:

        def run(laps: Laps) -> None:
            shutil.rmtree(runs, ignore_errors=True)
            simulation.run(study, runs, pool=pool, watch=laps)

        pids = [process.pid for process in pool.processes]
        seen = Interleaved.of(run, pids, rival, study.plan.rounds - 1, repeats)
    (done,) = runs.glob("*/last.safetensors")
    return seen, Weights(load_file(done))
