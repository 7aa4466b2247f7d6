"""To run code that is no package: packages it imports and never uses here, arguments, and a step at a time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


def open_checkout(folder: str, sources: str, expected: str) -> None:
    """Make the modules under `sources` importable, in front of all others."""
    place = Path(folder).resolve() / sources
    if not (place / expected).exists():
        raise FileNotFoundError(f"{place} has no {expected}; give the folder of a checkout")
    sys.path.insert(0, str(place))


def stand_in(package: str, *modules: str, **held: Any) -> None:
    """An empty package where it is not installed, so that an import of it passes."""
    if package not in sys.modules and find_spec(package) is None:
        for name in (package, *(f"{package}.{module}" for module in modules)):
            sys.modules[name] = ModuleType(name)
        vars(sys.modules[package]).update(held)


class Arguments:
    """What PFLlib's command line would hold: the values given, and 0 for what is switched off."""

    def __init__(self, **values: Any) -> None:
        names = dict.fromkeys(("dataset", "algorithm", "goal", "save_folder_name"), "bench")
        usual = {"device": "cpu", "join_ratio": 1.0, "time_threthold": 1e9, "learning_rate_decay_gamma": 1.0}
        counts = {"local_epochs": 1, "local_steps": 1, "eval_gap": 10**9}
        vars(self).update({**names, **usual, **counts, **values})

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class Stepped:
    """Somebody's training loop on a thread of its own, a batch at a time; call it for one step.

    The loop gets a loader that holds the next batch back until it is asked for: its own lines make the step.
    """

    def __init__(self, loop: Callable[[Stepped], object], batch: Batch) -> None:
        self._batch, self._go, self._done = batch, threading.Semaphore(0), threading.Semaphore(0)
        self._over, self._error = False, ""
        threading.Thread(target=self._run, args=(loop,), daemon=True).start()
        self._done.acquire()  # it has asked for its first batch

    def _run(self, loop: Callable[[Stepped], object]) -> None:
        torch.set_num_threads(1)  # of this thread
        try:
            loop(self)
        except Exception as error:  # told to whoever waits
            self._error = f"{type(error).__name__}: {error}"
        self._over = True
        self._done.release()

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self._done.release()
            self._go.acquire()
            yield self._batch

    def __call__(self) -> None:
        if not self._over:
            self._go.release()
            self._done.acquire()
        if self._over:
            raise RuntimeError(f"the loop ended: {self._error}")
