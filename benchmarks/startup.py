"""From `consilium run` to the first gradient step, against a plain loop that does the same step."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from benchmarks.measuring import Measured, load
from benchmarks.side_by_side import PEERS, demo_study, followed, our_command


def first_step(folder: Path, repeats: int) -> list[Measured]:
    """Against a loop with MONAI's U-Net, as one writes it, and, without a limit, one that imports torch alone."""
    study, arrays = demo_study(folder, "benchmarks.marked:Marked", 2)
    loop = [sys.executable, str(PEERS / "plain_loop.py"), str(arrays), "1"]
    marks = folder / "marks"
    ours, monai, bare = [], [], []
    for _ in range(repeats):
        ours.append(followed(our_command(study, folder / "runs"), marks, only_first=True))
        monai.append(followed(loop, marks, only_first=True, BENCH_NETWORK="monai"))
        bare.append(followed(loop, marks, only_first=True))
    found = []
    for what, field, limit in (("time", "first_step", 1.3), ("processor time of all processes", "first_cpu", 1.5)):
        mine, theirs, torch_alone = ([getattr(course, field) for course in all] for all in (ours, monai, bare))
        ratio = median(a / b for a, b in zip(mine, theirs))
        facts = {
            "of a loop that imports torch alone": median(a / b for a, b in zip(mine, torch_alone)),
            "which takes": median(torch_alone),
            "load": load(),
        }
        found.append(
            Measured(
                "startup", f"{what} to the first step", median(mine), "a plain loop with MONAI's U-Net",
                median(theirs), "s", ratio, limit, facts=facts,
            )
        )  # fmt: skip
    return found
