"""What it costs that nothing stored is used unchecked: a file is read through when it is first used."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from benchmarks.measuring import Measured, load
from benchmarks.small import small_study, write_small
from consilium import tree
from consilium.store import Store
from consilium.tree import message
from consilium.weights import Weights


@message
class Kept:
    """What a site may remember."""

    model: Weights


def checked_reads(folder: Path, repeats: int) -> list[Measured]:
    """30 MB of weights in a store: opened and checked for the first time, against written without waiting."""
    study = small_study(write_small(folder / "small"), "benchmarks.nothing:Echo", 1, rounds=1)
    item = Kept(study.task.initial())
    first, again, written = [], [], []
    for repeat in range(repeats):
        place = folder / "digests" / str(repeat)
        start = time.process_time()
        document = Store(place, durable=False).put(Kept(Weights.over(dict(item.model))))
        middle = time.process_time()
        fresh = Store(place)
        fresh.get(document, Kept)
        end = time.process_time()
        fresh.get(document, Kept)
        again.append(time.process_time() - end)
        first.append(end - middle)
        written.append(middle - start)
    size = tree.flatten(item).nbytes()
    facts = {"opened again": median(again), "GB/s": size / 1e9 / median(first), "load": load()}
    what = f"{size / 1e6:.0f} MB of stored weights, opened and checked"
    ratio = median(a / b for a, b in zip(first, written))
    return [
        Measured("digests", what, median(first), "digested and written", median(written), "s", ratio, 1.5, facts=facts)
    ]
