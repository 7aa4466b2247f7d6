"""The effect of γ, FedSM's threshold on the selector's confidence, in one run.

It needs no training. The global model and the personal model of the most probable site predict every case once. Each γ
only picks one of the two.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from consilium.analysis.figures import SPLIT_WORDS, side_labels
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import OpenRun, Runs
from consilium.errors import RunError
from consilium.methods.routing import GRID, score_both_models
from consilium.reports.figures import ROLES, role_of
from consilium.reports.style import INK, PALETTE, sheet
from consilium.reports.tables import called

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# finer where a trained selector's confidences lie: 0, 0.01, … 1, and ten steps in each further decade below 1
FINE_GRID = tuple(
    sorted({*GRID, *(i / 100 for i in range(101)), *(float(1 - 10.0**-k) for k in np.linspace(1, 5, 41).round(2))})
)
SPLITS = ("valid", "test")
_SPLIT_TINTS = {"valid": "#0072B2", "test": "#D55E00"}


@dataclass(frozen=True)
class Routed:
    """One case with the scores of both models that may answer for it."""

    site: str
    outside: bool
    split: str
    case: str
    top_site: str  # the site with the highest probability
    sure: float  # its probability
    by_global: float  # the headline score of the global model's prediction
    by_personal: float  # the headline score of that site's personal model

    def score(self, gamma: float) -> float:
        return self.by_personal if self.sure > gamma else self.by_global

    def choice(self, gamma: float) -> str:
        return f"personal/{self.top_site}" if self.sure > gamma else "global"


@dataclass(frozen=True)
class Oracle:
    """The best γ for an outside site's own test cases: the paper's choice, which nobody can make in advance."""

    gamma: float
    score: float
    at_chosen: float  # the same site's score at the run's own γ
    at_zero: float


@dataclass(frozen=True)
class GammaSweep:
    """Scores and selections for every γ of a grid."""

    grid: tuple[float, ...]
    chosen: float  # the run's γ
    cases: tuple[Routed, ...]

    def of(self, split: str, outside: bool = False) -> dict[str, list[Routed]]:
        """The cases of a split by site, of sites in or outside the federation."""
        found: dict[str, list[Routed]] = defaultdict(list)
        for case in self.cases:
            if case.split == split and case.outside == outside:
                found[case.site].append(case)
        return dict(sorted(found.items()))

    def site_mean(self, split: str) -> tuple[float, ...]:
        """The mean over the sites of the federation for every γ; empty without cases."""
        sites = self.of(split).values()
        means = [[_mean_at(cases, gamma) for cases in sites] for gamma in self.grid]
        return tuple(statistics.fmean(row) for row in means) if sites else ()

    def sites(self, split: str, outside: bool = False) -> dict[str, tuple[float, ...]]:
        return {
            site: tuple(_mean_at(cases, gamma) for gamma in self.grid)
            for site, cases in self.of(split, outside).items()
        }

    def selection(self, split: str, gamma: float, outside: bool = False) -> dict[str, dict[str, float]]:
        """Site → choice → share of its cases."""
        found: dict[str, dict[str, float]] = {}
        for site, cases in self.of(split, outside).items():
            choices = [case.choice(gamma) for case in cases]
            found[site] = {choice: choices.count(choice) / len(choices) for choice in sorted(set(choices))}
        return found

    @property
    def oracle_gamma(self) -> dict[str, Oracle]:
        return {site: self._oracle(cases) for site, cases in self.of("test", outside=True).items()}

    def _oracle(self, cases: Sequence[Routed]) -> Oracle:
        scores = [_mean_at(cases, gamma) for gamma in self.grid]
        best = [gamma for gamma, score in zip(self.grid, scores) if score >= max(scores) - 1e-9]
        gamma = best[(len(best) - 1) // 2]  # the middle one of several, as in the calibration
        return Oracle(gamma, _mean_at(cases, gamma), _mean_at(cases, self.chosen), _mean_at(cases, 0.0))

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"chosen": self.chosen, "grid": list(self.grid)}
        for split in SPLITS:
            if mean := self.site_mean(split):
                found[split] = {
                    "site_mean": list(mean),
                    "sites": _listed(self.sites(split)),
                    "outside": _listed(self.sites(split, outside=True)),
                    "selection": {
                        f"{gamma:g}": self.selection(split, gamma) | self.selection(split, gamma, outside=True)
                        for gamma in sorted({0.0, self.chosen})
                    },
                }
        found["oracle_gamma"] = {
            site: {**vars(oracle), "selection": self.selection("test", oracle.gamma, outside=True)[site]}
            for site, oracle in self.oracle_gamma.items()
        }
        return found


def _mean_at(cases: Sequence[Routed], gamma: float) -> float:
    return statistics.fmean(case.score(gamma) for case in cases)


def _listed(sites: Mapping[str, tuple[float, ...]]) -> dict[str, list[float]]:
    return {site: list(values) for site, values in sites.items()}


def gamma_sweep(run: OpenRun, say: Callable[[str], None] = lambda _: None) -> GammaSweep:
    """Predict every validation and test case of every site with both models; each γ then costs nothing."""
    cases: list[Routed] = []
    chosen = 0.0
    if not run.thresholded:
        raise RunError(f"{run.path} has no γ: method '{run.study.method_name}' sets no threshold. Give a run of fedsm.")
    for name in run.sites:
        worker = run.worker(name)
        model = run.super_model(worker)
        chosen = model.confidence
        say(f"global and personal models of {run.name} on {name}")
        for split in SPLITS:
            for batch in worker.site.data.whole(split, 16):
                scored = score_both_models(model, batch, run.study.task_fields.decides)
                cases += [Routed(name, name in run.guests, split, **vars(case)) for case in scored]
    return GammaSweep(tuple(sorted({*FINE_GRID, chosen})), chosen, tuple(cases))


def gamma(sweep: GammaSweep, what: str = "Dice") -> Figure:
    """Scores over γ on the left, the selector's choices for test cases on the right; a line marks the run's γ."""
    from matplotlib.patches import Patch

    scale = _ConfidenceAxis.of(sweep)
    with sheet(height=3.7) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1.35, 1])
        _score_panel(left, sweep, scale)
        left.set(title="Score by γ", ylabel=what)
        shares = np.array([_shares(sweep, value) for value in sweep.grid]).T
        right.stackplot(scale(sweep.grid), shares, colors=[fill for _, fill in ROLES], linewidth=0, step="post")
        right.set(title="Who answers test cases, mean over sites", ylim=(0, 1))
        right.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
        for axes in (left, right):
            scale.draw(axes, sweep.chosen)
        figure.supxlabel("γ: an image goes to the global model unless the selector is surer than this", fontsize=9)
        figure.legend(
            handles=[Patch(color=fill, label=name) for name, fill in ROLES],
            loc="outside upper right",
            ncols=3,
            frameon=False,
            handlelength=1,
            handleheight=1,
        )
        return figure


def _score_panel(axes: Axes, sweep: GammaSweep, scale: _ConfidenceAxis) -> None:
    lines = {
        f"{SPLIT_WORDS[s]}, site mean": (values, _SPLIT_TINTS[s])
        for s in _SPLIT_TINTS
        if (values := sweep.site_mean(s))
    }
    for i, (site, values) in enumerate(sweep.sites("test", outside=True).items()):
        lines[f"{site} (outside), test"] = (values, tint := PALETTE[(2 + i) % len(PALETTE)])
        oracle = sweep.oracle_gamma[site]
        axes.plot(*scale((oracle.gamma,)), oracle.score, "o", color=tint, markerfacecolor="white", zorder=3)
    for name, (values, tint) in lines.items():
        dash = (0, (4, 2)) if "(outside)" in name else "-"
        axes.plot(scale(sweep.grid), values, color=tint, linewidth=1.8, linestyle=dash, drawstyle="steps-post")
    axes.grid(axis="y")
    side_labels(axes, {name: v[-1] for name, (v, _) in lines.items()}, {name: t for name, (_, t) in lines.items()})


@dataclass(frozen=True)
class _ConfidenceAxis:
    """An axis of γ with room near 1, where a trained selector's confidences lie: 0.9 is at 1, 0.99 at 2, …"""

    last: float  # where 1 itself is drawn

    @classmethod
    def of(cls, sweep: GammaSweep) -> _ConfidenceAxis:
        """An axis that ends a little beyond the highest confidence."""
        surest = max((case.sure for case in sweep.cases), default=0.0)
        return cls(min(5.3, math.ceil(-math.log10(max(1 - surest, 1e-6))) + 0.3))

    def __call__(self, grid: Sequence[float]) -> list[float]:
        return [-math.log10(1 - value + 10**-self.last) for value in grid]

    def draw(self, axes: Axes, chosen: float) -> None:
        from matplotlib.patheffects import withStroke

        known = (0, 0.3, 0.5, 0.7, 0.9, 0.99) if self.last < 2.5 else (0, 0.5, 0.9, 0.99, 0.999, 0.9999)
        ticks = [*(tick for tick in known if 1 - tick > 3 * 10**-self.last), 1]
        axes.set_xticks(self(ticks), [f"{tick:g}" for tick in ticks])
        axes.set_xlim(*self((0, 1)))
        (place,) = self((chosen,))
        axes.axvline(place, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
        late = place > 0.75 * self.last
        text = axes.annotate(
            f"γ = {chosen:g}",
            (place, 0.5),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if late else 4, 0),
            textcoords="offset points",
            ha="right" if late else "left",
        )
        text.set_path_effects([withStroke(linewidth=3, foreground="#ffffffcc")])


def _shares(sweep: GammaSweep, value: float) -> list[float]:
    sums = [0.0, 0.0, 0.0]
    found = sweep.selection("test", value)
    for site, choices in found.items():
        for choice, share in choices.items():
            sums[role_of(choice, site)] += share / len(found)
    return sums


def analyse_gamma(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for run in [run for run in runs.opened if run.thresholded] or runs.opened[:1]:
        sweep = gamma_sweep(run, say)
        at = {split: dict(zip(sweep.grid, means)) for split in SPLITS if (means := sweep.site_mean(split))}
        words = [
            f"{split} {means[0.0]:.3f} at γ = 0, {means[sweep.chosen]:.3f} at the run's {sweep.chosen:g}, "
            f"{means[1.0]:.3f} at 1"
            for split, means in at.items()
        ]
        oracle = [f"{site}'s own test cases would like γ = {o.gamma:g}" for site, o in sweep.oracle_gamma.items()]
        yield Finding(
            "gamma",
            "How sure the selector must be",
            "; ".join(["Site means: " + "; ".join(words), *oracle]),
            sweep.to_json(),
            {"gamma": gamma(sweep, called(run.study.task.headline))},
            run=run.path,
        )
