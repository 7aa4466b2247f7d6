"""What it costs to read training batches, against the training steps they are for; in processor time."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.measuring import Measured, load
from consilium.data.cases import Cases
from consilium.data.phantoms import write_phantom
from consilium.demo import CASES, SIZE
from consilium.machine import peak_memory_mb
from consilium.ready_studies import folder_of_studies
from consilium.site_opening import open_arrays
from consilium.study import Study
from consilium.study_reading import load_study, make_study

LIMIT = 0.05  # of a training step


def batches_and_patches(folder: Path, repeats: int) -> list[Measured]:
    """The demo's pictures in batches of 8, and patches of volumes, both read from memory-mapped arrays."""
    eyes, volumes = folder / "loading-retina", folder / "loading-prostate"
    if not eyes.exists():
        write_phantom("retina", eyes, CASES, SIZE, 0)
    write_phantom("prostate", volumes, 18, 96, 0)
    demo = load_study(folder_of_studies() / "demo_fedavg.toml", [f'data.federation="{eyes}"'])
    patches = make_study({
        "data": {"federation": str(volumes)},
        "task": {"network": "unet3d", "widths": [16, 32, 64, 128], "patch": [16, 64, 64]},
        "local": {"batch_size": 2},
        "method": {"name": "fedavg"},
    })  # fmt: skip
    return [
        _measured("demo", "a batch of the demo, 8 pictures of 64 × 64", demo, repeats),
        _measured("patches", "2 patches of 16 × 64 × 64 of volumes of 96 × 96", patches, repeats),
    ]


def _measured(name: str, what: str, study: Study, repeats: int) -> Measured:
    federation = study.federation()
    parts = tuple(open_arrays(study, federation, site) for site in federation.sites)
    data = Cases(parts, study.task_fields.augment, study.task_fields.patch, bool(study.preprocess.slices))
    torch.set_num_threads(1)
    reading, stepping = [], []
    for repeat in range(repeats):
        seconds, steps = _epoch(study, data, repeat)
        reading.append(seconds)
        stepping.append(steps)
    ours, theirs = median(reading), median(stepping)
    volume = max(part.image(i).nbytes for part in parts for i in range(len(part))) / 1e6
    facts = {"load": load(), "largest image MB": volume, "peak memory MB": peak_memory_mb()}
    return Measured(f"loading-{name}", what, ours, "its training step", theirs, "s", ours / theirs, LIMIT, facts=facts)


def _epoch(study: Study, data: Cases, epoch: int, most: int = 10) -> tuple[float, float]:
    """Processor seconds per batch: to read it, and to learn from it."""
    network = study.task.network().train()
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    reading = learning = 0.0
    batches = data.batches(study.local.batch_size, epoch, 0)
    count = 0
    while count < most:
        start = time.process_time()
        batch = next(batches, None)
        if batch is None:
            break
        read = time.process_time()
        optimiser.zero_grad()
        study.task.loss(network(batch.images), batch).backward()
        optimiser.step()
        reading, learning = reading + read - start, learning + time.process_time() - read
        count += 1
    return reading / count, learning / count
