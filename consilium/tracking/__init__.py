"""Figures of a run in the tools people already use: TensorBoard, MLflow, Weights & Biases.

`[study] track = ["tensorboard"]` opens a tracker beside the run. It only follows the journal, so it cannot change a
result. Another tool is a class with the four methods of `Tracker`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from consilium.errors import RunStopped, StudyError

Event = Mapping[str, Any]
Ending = Literal["finished", "interrupted", "failed"]
# the name in a study: the module here, the package it needs, the extra that installs it
TRACKERS = {
    "tensorboard": ("consilium.tracking.tensorboard", "tensorboard", "tensorboard"),
    "mlflow": ("consilium.tracking.mlflow", "mlflow", "mlflow"),
    "wandb": ("consilium.tracking.wandb", "wandb", "wandb"),
}
MLFLOW_STORE = "mlflow.db"  # beside run folders


class Tracker(Protocol):
    """Takes the figures of one run."""

    def settings(self, study: Mapping[str, Any]) -> None:
        """The complete study: tables of keys."""

    def figures(self, values: Mapping[str, float], round: int) -> None:
        """Figures by name, such as "loss/hk"."""

    def note(self, name: str, text: str, round: int) -> None:
        """Words, such as why a site was rejected."""

    def close(self, how: Ending) -> None:
        """The run has ended; unless it is finished, it may be resumed."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse names that are unknown and tools that are not installed."""
    for name in names:
        if name not in TRACKERS:
            raise StudyError(f"[study] track: there is no '{name}'; choose from {', '.join(TRACKERS)}.")
        _, package, extra = TRACKERS[name]
        if find_spec(package) is None:
            raise StudyError(
                f"[study] track = ['{name}'] needs the package {package}: pip install 'consilium[{extra}]'."
            )


@contextmanager
def tracked(
    names: Sequence[str], folder: Path, study: Mapping[str, Any], warn: Callable[[str], None]
) -> Iterator[Callable[[Event], None]]:
    """Open trackers for a run in `folder`; gives what takes the events of its journal.

    A tracker that fails, also when it is opened, is left out from then on and `warn` gets a sentence: no run ends
    because of it.
    """
    check_trackers(names)
    trackers: dict[str, Tracker] = {}
    failed: list[str] = []  # sentences for `warn`: the journal takes them once it has begun

    def each(act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(trackers.items()):
            try:
                act(tracker)
            except Exception as error:
                del trackers[name]
                failed.append(f"{name} failed and is not told any more: {type(error).__name__}: {error}")

    def follow(event: Event) -> None:
        each(lambda tracker: show(tracker, event))
        while failed:
            warn(failed.pop(0))

    for name in names:
        try:
            trackers[name] = import_module(TRACKERS[name][0]).open_tracker(folder)
        except Exception as error:
            failed.append(f"{name} cannot be opened and is left out: {type(error).__name__}: {error}")
    each(lambda tracker: tracker.settings(study))
    how: Ending = "interrupted"  # also by Ctrl-C, which is no Exception
    try:
        yield follow
        how = "finished"
    except RunStopped:
        raise
    except Exception:
        how = "failed"
        raise
    finally:
        each(lambda tracker: tracker.close(how))
        for text in failed:
            warn(text)


def show(tracker: Tracker, event: Event) -> None:
    """Give one event of a journal to a tracker."""
    if values := figures_of(event):
        tracker.figures(values, event.get("round", 0))
    if event["event"] in ("lost", "refused", "left out"):
        tracker.note(f"{event['event']}/{event['site']}", event.get("why", ""), event.get("round", 0))


def figures_of(event: Event) -> dict[str, float]:
    """The figures of one event, by name."""
    what = event["event"]
    if what == "train":
        keys = ("loss", "selector_loss", "seconds", "bytes_up", "bytes_down")
        aside = "" if event["phase"] == "train" else f"{event['phase']}/"
        return {f"{aside}{key}/{event['site']}": float(event[key]) for key in keys if event.get(key) is not None}
    if what == "round" and event["phase"] == "train":
        return {"round_seconds": float(event["seconds"])}
    if what != "score":
        return {}
    over = event["phase"] in ("best", "last")
    place = "" if event["phase"] == "train" else f"{event['phase']}/"
    found: dict[str, float] = {}
    for split in ("valid", "test") if over else ("valid",):  # test scores are for the end
        head = f"{place}{split}/{event['model']}/{event['metric']}"
        values = {"site_mean": event[split].get("site_mean"), **event[split].get("sites", {})}
        found |= {f"{head}/{name}": float(value) for name, value in values.items() if value is not None}
    return found
