"""Memory of one worker with volumes: to make its cache, read patches and score whole volumes; in new processes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import Measured, anonymous, peak_of

CASES, SIDE, SLICES = 6, 256, 64
VOLUME = SLICES * SIDE * SIDE * 4 / 1e6  # MB of one, as the network reads it
LIMITS = {"build": 8.0, "patches": 1.0, "scores": 12.0}  # volumes
SAID = {
    "build": "to make the cache of six volumes",
    "patches": "to read patches of 32 × 64 × 64, twice over all volumes",
    "scores": "to segment a whole volume by a sliding window, and its Dice",
}


def few_volumes(folder: Path, repeats: int) -> list[Measured]:
    """Growth of a worker's own memory, beside one preprocessed volume; `repeats` changes nothing here."""
    place = folder / "volumes"
    if not place.exists():
        _write(place)
    lines = []
    for kind, limit in LIMITS.items():  # the cache is made first, by the one who measures it
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.volumes", str(place), kind]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        grown = json.loads(done.stdout) / 1e6
        said = f"a worker's memory {SAID[kind]}"
        lines.append(Measured(f"volumes-{kind}", said, grown, "one volume", VOLUME, "MB", grown / VOLUME, limit))
    return lines


def _write(folder: Path) -> None:
    import nibabel

    from consilium.data.site_folder import Case
    from consilium.data.site_writing import write_federation_toml, write_site

    write_federation_toml(folder, "segmentation", ["organ"], 3, 1)
    place = folder / "west"
    place.mkdir(parents=True)
    cases = []
    for i in range(CASES):
        rng = np.random.default_rng(i)
        values = rng.integers(0, 1000, (SIDE, SIDE, SLICES), dtype=np.int16)
        mask = np.zeros(values.shape, np.uint8)
        mask[60:120, 60:120, 20:40] = 1
        for name, array in ((f"{i}.nii", values), (f"{i}-mask.nii", mask)):
            nibabel.save(nibabel.Nifti1Image(array, np.diag([-1.0, -1.0, 3.0, 1.0])), place / name)  # type: ignore[attr-defined]
        split = "train" if i < CASES - 1 else "test"
        cases.append(Case(f"c{i}", f"p{i}", split, Path(f"{i}.nii"), Path(f"{i}-mask.nii")))
    write_site(folder, "west", cases)


def _study(folder: Path) -> Any:
    from consilium.study_reading import make_study

    return make_study(
        {
            "data": {"federation": str(folder)},
            "preprocess": {"orientation": "RAS", "normalise": "zscore"},
            "task": {"network": "unet3d", "widths": [4, 8], "patch": [32, 64, 64], "augment": []},
            "local": {"batch_size": 2},
            "method": {"name": "fedavg"},
        }
    )


def _grown(folder: Path, kind: str) -> int:
    """Bytes by which this process's own memory grew; mapped files are not its own."""
    import nibabel  # noqa: F401  imports are not what is measured
    import scipy.ndimage
    import scipy.sparse  # noqa: F401
    import SimpleITK  # noqa: F401
    import torch

    from consilium.data.cases import Cases
    from consilium.site_opening import open_arrays

    torch.set_num_threads(1)
    study = _study(folder)
    federation = study.federation()

    def build() -> None:
        open_arrays(study, federation, "west")

    def patches() -> None:
        for epoch in range(2):
            for batch in data.batches(2, epoch, 0):
                assert batch.images.shape[2:] == (32, 64, 64)

    def scores() -> None:
        for batch in data.whole("test", 1):
            for output, truth in zip(study.task.infer(weights, batch.images), batch.truth):
                study.task.score(output, truth, full=False)

    works: dict[str, Callable[[], None]] = {"build": build, "patches": patches, "scores": scores}
    if kind != "build":
        data = Cases((open_arrays(study, federation, "west"),), (), study.task_fields.patch)
        weights = study.task.initial()
        next(data.batches(2, 9, 0))
    gc.collect()
    before = anonymous(os.getpid())
    with peak_of([]) as peak:
        works[kind]()
    return int(peak.server - before)


if __name__ == "__main__":
    print(json.dumps(_grown(Path(sys.argv[1]), sys.argv[2])))
