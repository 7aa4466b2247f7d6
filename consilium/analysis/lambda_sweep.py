"""The effect of λ, the share of its own model that a FedSM site keeps, over several runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from consilium.analysis.figures import MANY, side_labels
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import Runs
from consilium.errors import RunError
from consilium.reports.reading import RunView, settings
from consilium.reports.style import INK, WIDTH, sheet
from consilium.reports.tables import called

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAY_DIFFER = ("study.seed", "study.name", "method.pull")


@dataclass(frozen=True)
class Level:
    """A site mean over the runs of one λ; `sd` of a single run is None."""

    mean: float
    sd: float | None

    @classmethod
    def over(cls, values: Sequence[float]) -> Level:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.sd is None else f"{self.mean:.4f} ± {self.sd:.4f}"


@dataclass(frozen=True)
class Pull:
    """The scores of one λ: validation of the headline model, and test scores of every model."""

    pull: float
    runs: int
    valid: Level | None
    test: Mapping[str, Level]  # model → site mean


@dataclass(frozen=True)
class LambdaSweep:
    """Runs that differ only in λ, in its order."""

    pulls: tuple[Pull, ...]
    headline: str  # the model the method is about
    metric: str
    members: int  # K

    @property
    def chosen(self) -> float | None:
        """The λ with the best validation score; ties go to the first."""
        valid = [found for found in self.pulls if found.valid is not None]
        return max(valid, key=lambda found: found.valid.mean).pull if valid else None  # type: ignore[union-attr]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(model for found in self.pulls for model in found.test))

    def to_json(self) -> dict[str, Any]:
        return {
            "headline": self.headline,
            "metric": self.metric,
            "chosen": self.chosen,
            "pulls": [
                {
                    "pull": found.pull,
                    "runs": found.runs,
                    "valid": None if found.valid is None else vars(found.valid),
                    "test": {model: vars(level) for model, level in found.test.items()},
                }
                for found in self.pulls
            ],
        }

    def to_markdown(self) -> str:
        head = ["λ", "runs", "validation", *(f"test, {model}" for model in self.models)]
        rule = ["---:"] * len(head)
        rows = [
            [
                f"{found.pull:g}{' (chosen)' if found.pull == self.chosen else ''}",
                str(found.runs),
                str(found.valid or "–"),
                *(str(found.test.get(model, "–")) for model in self.models),
            ]
            for found in self.pulls
        ]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def is_lambda_sweep(runs: Sequence[RunView]) -> bool:
    """Whether these runs differ in λ, and otherwise only in their seeds."""
    return len(_pulls(runs)) > 1 and not _differing(runs)


def lambda_sweep(runs: Sequence[RunView]) -> LambdaSweep:
    """Site means by λ, from the runs' summaries; no model is opened."""
    without = [run for run in runs if "method.pull" not in settings(run)]
    if without:
        raise RunError(f"{without[0].folder} has no [method] pull; a λ sweep compares runs of fedsm.")
    if differing := _differing(runs):
        raise RunError(f"a λ sweep compares runs that differ only in method.pull; these differ in {differing[0]} too.")
    by_pull = _pulls(runs)
    if len(by_pull) < 2:
        raise RunError("a λ sweep needs runs with at least two values of method.pull; give more runs.")
    about = runs[0].headline
    assert about is not None
    found = [_pull(pull, by_pull[pull], about.metric, about.label) for pull in sorted(by_pull)]
    members = len(runs[0].summary["headline"]["sites"]) if runs[0].summary else 0
    return LambdaSweep(tuple(found), about.model, about.metric, members)


def _pulls(runs: Sequence[RunView]) -> dict[float, list[RunView]]:
    found: dict[float, list[RunView]] = defaultdict(list)
    for run in runs:
        if (pull := settings(run).get("method.pull")) is not None:
            found[float(pull)].append(run)
    return found


def _differing(runs: Sequence[RunView]) -> list[str]:
    every = [settings(run) for run in runs]
    keys = dict.fromkeys(key for found in every for key in found if key not in _MAY_DIFFER)
    return [key for key in keys if any(found.get(key) != every[0].get(key) for found in every)]


def _pull(pull: float, runs: Sequence[RunView], metric: str, label: str) -> Pull:
    summaries = [run.summary for run in runs if run.summary]
    valid = [s["best"]["valid"]["site_mean"] for s in summaries if "site_mean" in s["best"].get("valid", {})]
    models = dict.fromkeys(model for s in summaries for model in s["best"]["scores"])
    test: dict[str, Level] = {}
    for model in models:
        entries = [run.entry(model, metric, label) for run in runs]
        if values := [entry["site_mean"] for entry in entries if "site_mean" in entry]:
            test[model] = Level.over(values)
    return Pull(pull, len(runs), Level.over(valid) if valid else None, test)


def pulls(sweep: LambdaSweep, what: str = "Dice") -> Figure:
    """Site means over λ: test scores solid, validation dashed; the λ best on validation is a line."""
    with sheet(height=3.4, width=0.7 * WIDTH) as figure:
        axes = figure.subplots()
        tint = {f"{model} model, test": MANY[i % len(MANY)] for i, model in enumerate(sweep.models)}
        ends: dict[str, float] = {}
        for name, model in zip(tint, sweep.models, strict=True):
            found = [(one.pull, one.test[model]) for one in sweep.pulls if model in one.test]
            _level_line(axes, found, tint[name], "-")
            ends[name] = found[-1][1].mean
        valid = [(one.pull, one.valid) for one in sweep.pulls if one.valid is not None]
        if valid:
            name = f"{sweep.headline} model, validation"
            tint[name] = tint[f"{sweep.headline} model, test"]
            _level_line(axes, valid, tint[name], "--")
            ends[name] = valid[-1][1].mean
        axes.set(xlabel="λ: how much of its own model a site keeps", ylabel=f"{what}, mean over sites")
        axes.set_xticks([one.pull for one in sweep.pulls])
        axes.grid(axis="y")
        if sweep.chosen is not None:
            axes.axvline(sweep.chosen, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)
        side_labels(axes, ends, tint)
        return figure


def _level_line(axes: Axes, found: Sequence[tuple[float, Any]], colour: str, dash: str) -> None:
    x, y = [pull for pull, _ in found], [level.mean for _, level in found]
    sd = [level.sd or 0.0 for _, level in found]
    axes.errorbar(
        x, y, yerr=sd if any(sd) else None, color=colour, linestyle=dash, linewidth=1.8, marker="o", markersize=5,
        markerfacecolor=colour if dash == "-" else "white", capsize=3,
    )  # fmt: skip


def analyse_lambda(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    sweep = lambda_sweep(runs.views)
    words = [f"λ = {one.pull:g}: {one.test[sweep.headline]}" for one in sweep.pulls if sweep.headline in one.test]
    yield Finding(
        "lambda",
        "How much a site keeps of its own model",
        f"Test {called(sweep.metric)} of the {sweep.headline} model. {'; '.join(words)}",
        sweep.to_json(),
        {"lambda": pulls(sweep, called(sweep.metric))},
        sweep.to_markdown(),
    )
