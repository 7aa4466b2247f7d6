"""A round on teachers' labels against the same round on the sites' own complete labels."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measuring import Clock, Measured, Repeat, Spent, load, median_ratio, typical
from consilium import simulation
from consilium.data.phantoms import write_phantom
from consilium.study import Study
from consilium.study_reading import make_study

CASES, PIXELS = 40, 32
ROUNDS = 3  # in a repeat
LIMIT = 1.10
PLAIN = "FedAvg on complete labels"
OFF = {
    "noise": {"arce": 0.0},
    "uncertainty": {"scheduler": "none", "parts": "none"},
    "main_teacher": {"labels": "pretrained"},
    "sharpness": {"strategy": "none"},
}


def labelled_rounds(folder: Path, repeats: int) -> list[Measured]:
    """Three abdomen phantom sites, patches of 16 × 24 × 24, turned and flipped, all sites in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _compare(folder, repeats)
    finally:
        torch.set_num_threads(threads)


def _compare(folder: Path, repeats: int) -> list[Measured]:
    data = folder / "abdomen"
    if not data.exists():
        write_phantom("abdomen", data, CASES, PIXELS, 0)
    rounds = 2 + repeats * ROUNDS  # the first makes the teachers' labels, after the last the run is scored
    one = {"teachers": {"rounds": 1}}
    weighed = {**OFF, "uncertainty": {"scheduler": "tail-shift", "weigh_until": float(rounds), "parts": "none"}}
    studies = {
        PLAIN: _study(data, rounds, {"name": "fedavg"}, {"word": "all", "abdomenct1k": "all", "amos": "all"}),
        "cached": _study(data, rounds, {"name": "fedavg-pl", **one}),
        "live": _study(data, rounds, {"name": "fedavg-pl", "teachers": {"rounds": 1, "labels": "live"}}),
        "doubt": _study(data, rounds, {"name": "ufps", **weighed, **one}),
    }
    turns = {name: _Turn(study, folder / f"runs-{name.split()[0]}") for name, study in studies.items()}
    seen: dict[str, list[Repeat]] = {name: [] for name in turns}
    for turn in turns.values():
        turn.round()
    for _ in range(repeats):
        in_turn = [{name: turn.round() for name, turn in turns.items()} for _ in range(ROUNDS)]
        for name, found in seen.items():
            found.append([spent[name] for spent in in_turn])
    for turn in turns.values():
        turn.finish()
    seconds = {name: median(map(typical, found)) for name, found in seen.items()}

    def against(name: str, what: str, **facts: Any) -> Measured:
        found = {"in processor time": median_ratio(seen[name], seen[PLAIN], "chain"), **facts, "load": load()}
        ratio = median_ratio(seen[name], seen[PLAIN])
        return Measured("teachers", what, seconds[name], PLAIN, seconds[PLAIN], "s", ratio, LIMIT, facts=found)

    live = median_ratio(seen["live"], seen[PLAIN])
    return [
        against("cached", "a round of FedAvg* with cached teachers", **{'with teachers = "live"': live}),
        against("doubt", "a round of UFPS with cached teachers and loss weights by uncertainty"),
    ]


def _study(data: Path, rounds: int, method: Mapping[str, Any], annotated: Mapping[str, str] | None = None) -> Study:
    return make_study({
        "study": {"rounds": rounds, "score_every": rounds, "leave_out": ["btcv"]},
        "data": {"federation": str(data), "annotated": dict(annotated or {})},
        "preprocess": {"window": [-200.0, 300.0]},
        "task": {"network": "plain-unet", "widths": [8, 16, 32], "residual": True, "loss": "dice+ce",
                 "patch": [16, 24, 24], "augment": ["flip", "rotate"]},
        "local": {"optimizer": "adamw", "lr": 5e-3, "batch_size": 2},
        "method": dict(method),
    })  # fmt: skip


class _Turn:
    """A run in a thread of its own that goes on only when it is its turn, one round of training at a time."""

    def __init__(self, study: Study, runs: Path) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._wrong: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(study, runs), daemon=True)
        self._thread.start()

    def round(self) -> Spent:
        """Go on to the end of the next round of training, and what that took."""
        clock = Clock()
        self._go.release()
        self._done.acquire()
        spent = clock.stop()
        if self._wrong is not None:
            raise self._wrong
        return spent

    def finish(self) -> None:
        """Let the run come to its end; the rounds that are left take no more turns."""
        self._go.release(1000)
        self._thread.join()
        if self._wrong is not None:
            raise self._wrong

    def _run(self, study: Study, runs: Path) -> None:
        self._go.acquire()
        try:
            simulation.run(study, runs, workers=0, watch=self._watch)
        except BaseException as error:
            self._wrong = error
        self._done.release()

    def _watch(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "round" and event["phase"] == "train":
            self._done.release()
            self._go.acquire()
