"""How long the runs of a suite will take: a few timed steps of every method, times the steps of its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from consilium.dry_run import estimated_seconds, time_text, tried_times
from consilium.method import Method
from consilium.step_timing import StepTimes
from consilium.study import Study
from consilium.suites.drawing import federation
from consilium.suites.planning import Planned, candidates, study_of
from consilium.suites.sections import Suite

_FREE = ("confidence", "outlier_quantile", "pull", "mu")  # fields of methods that change no step


@dataclass
class SuiteClock:
    """Estimates of runs by name, held against what the runs that are over took."""

    expected: dict[str, float] = field(default_factory=dict)
    methods: int = 0  # that were timed
    over: dict[str, float] = field(default_factory=dict)  # seconds of runs that were made

    def start(self) -> str:
        """A sentence before the first run."""
        count = len(self.expected)
        runs, methods = f"{count} run{'s' * (count != 1)}", f"{self.methods} method{'s' * (self.methods != 1)}"
        return (
            f"{runs} to do, about {time_text(sum(self.expected.values()))} on this machine: an estimate from a few "
            f"timed steps of {methods}, without the start of each run"
        )

    def made(self, title: str, seconds: float) -> None:
        self.over[title] = seconds

    def left(self) -> float:
        """Seconds of all runs that are not over; the estimates are corrected by those that are."""
        known = [title for title in self.over if title in self.expected]
        guessed = sum(self.expected[title] for title in known)
        pace = sum(self.over[title] for title in known) / guessed if guessed else 1.0
        return pace * sum(seconds for title, seconds in self.expected.items() if title not in self.over)


def estimate(suite: Suite, to_do: Sequence[Planned], workers: int | None, say: Callable[[str], None]) -> SuiteClock:
    """Time every kind of run once, and say how long all will take; what cannot be tried is told by its own run.

    Runs that differ in seeds, rates or thresholds take the same steps.
    """
    clock = SuiteClock()
    known: dict[Any, StepTimes] = {}
    try:
        for planned in to_do:
            study = study_of(suite, _settled(suite, planned))
            kind = _kind(suite, planned, study)
            if kind not in known:
                known[kind] = tried_times(study)
            clock.expected[called(planned)] = estimated_seconds(study, known[kind], workers)
    except Exception as error:
        say(f"the time cannot be estimated: {error}")
        return SuiteClock()
    clock.methods = len({name for name, *_ in known})
    if to_do:
        say(clock.start())
    return clock


def called(planned: Planned) -> str:
    """A run's name before and after its settings are chosen."""
    return planned.title if planned.trial else f"{planned.row.name}, seed {planned.seed}"


def _settled(suite: Suite, planned: Planned) -> Planned:
    """A run that waits for a choice, with the first candidate."""
    return Planned(planned.row, planned.chosen or candidates(suite, planned.row)[0], planned.seed)


def _kind(suite: Suite, planned: Planned, study: Study) -> Any:
    """What decides how long a step takes; phantoms drawn anew for every seed are alike."""
    local = study.local
    place = federation(suite, planned.row.settings, suite.heading.chosen_on)
    data = replace(study.data, federation=str(place)) if place is not None else study.data
    parts = (data, study.preprocess, study.task_fields, study.network, study.privacy)
    how = (local.batch_size, local.epochs, local.threads, local.device, local.precision)
    return study.method_name, _steps_of(study.method), *map(repr, parts), *how


def _steps_of(method: Method) -> str:
    """The fields of a method without rates and thresholds; 0 may switch a part off, and so counts."""
    free = {f.name for f in fields(method) if f.name.endswith("lr") or f.name in _FREE}
    every = {f.name: getattr(method, f.name) for f in fields(method)}
    return repr({k: "any" if k in free and isinstance(v, float) and v else v for k, v in every.items()})
