"""The selector's choices at a site that did not train: tables 5 and 11 of FedSM, at three thresholds.

γ = 0 never uses the global model. The run's γ was chosen on the validation cases of the training sites. `oracle_gamma`
is the paper's best γ, chosen on the unseen site's own test cases, which nobody can do in advance. It decides nothing
here and always has that name.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from consilium.analysis.analyse import analyse
from consilium.analysis.opening import open_run
from consilium.files import read_json
from consilium.reports.comparing import cell
from consilium.reports.reading import RunView
from consilium.reports.tables import Cell, TextCell, called
from consilium.scores.means import MEAN
from consilium.suites.entries import RowRuns
from consilium.suites.planning import SuiteRow
from consilium.suites.rendering import json_papers, markdown_text, rich_tables
from consilium.suites.sections import LEAVE_OUT, PaperTable, Suite

if TYPE_CHECKING:
    from rich.console import RenderableType

KINDS = ("γ = 0", "γ of the run", "oracle_gamma")
GLOBAL = "global"


@dataclass(frozen=True)
class UnseenResult:
    """The selector's choices for an unseen site's test cases at one threshold; means over seeds."""

    site: str
    kind: str
    gammas: tuple[float, ...]  # one per seed
    shares: Mapping[str, float]  # "global" or the site whose personal model answered → share of the cases
    score: Cell


@dataclass(frozen=True)
class SelectionTable:
    """One method's selections at the sites left out in turn, and the paper's."""

    method: str  # as its rows are called
    metric: str
    sites: tuple[str, ...]
    lines: tuple[UnseenResult, ...]
    papers: tuple[PaperTable, ...]

    @property
    def title(self) -> str:
        return f"Whom the selector of {self.method} asks at unseen sites: share of their test cases"

    @property
    def notes(self) -> list[str]:
        return [
            "γ of the run: chosen on validation cases of the sites that trained. oracle_gamma: the best for the unseen "
            "site's own test cases, as in the paper; nobody could choose it beforehand, and nothing here depends on it."
        ]

    def grid(self) -> list[list[TextCell]]:
        heads = ["unseen site", "threshold", "γ", "global model", *self.sites, called(self.metric)]
        body = [
            [
                line.site,
                line.kind,
                ", ".join(f"{gamma:g}" for gamma in dict.fromkeys(line.gammas)),
                *("–" if who == line.site else f"{line.shares.get(who, 0.0):.2f}" for who in (GLOBAL, *self.sites)),
                line.score.text(),
            ]
            for line in self.lines
        ]
        return [[TextCell(text) for text in texts] for texts in (heads, *body)]

    def to_rich(self) -> list[RenderableType]:
        return rich_tables(self.title, self.grid(), self.notes, self.papers)

    def to_markdown(self) -> str:
        return markdown_text(self.title, self.grid(), self.notes, self.papers)

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "metric": self.metric,
            "lines": [asdict(line) for line in self.lines],
            "papers": json_papers(self.papers),
        }


def selection_tables(
    suite: Suite, standings: Sequence[RowRuns], say: Callable[[str], None]
) -> tuple[SelectionTable, ...]:
    """One table per method with a threshold; empty where no site is left out in turn."""
    papers = tuple(paper for paper in suite.papers if paper.about == "selection")
    methods: dict[str, list[RowRuns]] = defaultdict(list)
    for standing in standings:
        settings = dict(standing.choice.row.settings)
        turn = settings.pop(LEAVE_OUT, None)
        if turn and standing.runs and all(_has_threshold(run) for run in standing.runs.values()):
            methods[SuiteRow(standing.choice.row.method, settings).name].append(standing)
    return tuple(_table(name, found, suite, papers, say) for name, found in methods.items())


def _has_threshold(run: RunView) -> bool:
    about = run.headline
    return about is not None and about.model == "super" and open_run(run.folder).thresholded


def _table(
    name: str, standings: Sequence[RowRuns], suite: Suite, papers: tuple[PaperTable, ...], say: Callable[[str], None]
) -> SelectionTable:
    lines: list[UnseenResult] = []
    for standing in standings:
        sweeps = [_sweep(run, say) for run in standing.runs.values()]
        for site in standing.choice.row.settings[LEAVE_OUT]:
            lines += _asked(site, sweeps)
    about = next(iter(standings[0].runs.values())).headline
    assert about is not None  # finished runs have one
    sites = dict.fromkeys(site for turn in suite.grid[LEAVE_OUT] for site in turn)
    sites |= dict.fromkeys(who for line in lines for who in line.shares if who != GLOBAL)
    return SelectionTable(
        name, about.metric, tuple(sites), tuple(lines), papers if MEAN in suite.heading.labels else ()
    )


def _sweep(run: RunView, say: Callable[[str], None]) -> Mapping[str, Any]:
    """The γ sweep of a run; made once, and left in its folder as `consilium analyse` leaves it."""
    file = run.folder / "analysis" / "gamma.json"
    if not file.exists():
        say(f"selections of {run.name} at every γ")
        analyse([run.folder], ["gamma"])
    found: Mapping[str, Any] = read_json(file)
    return found


def _asked(site: str, sweeps: Sequence[Mapping[str, Any]]) -> list[UnseenResult]:
    found = []
    for kind in KINDS:
        seen = [_at(sweep, site, kind) for sweep in sweeps]
        choices = dict.fromkeys(choice for _, shares, _ in seen for choice in shares)
        shares = {
            choice.removeprefix("personal/"): statistics.fmean(shares.get(choice, 0.0) for _, shares, _ in seen)
            for choice in choices
        }
        gammas, scores = tuple(gamma for gamma, _, _ in seen), [score for _, _, score in seen]
        found.append(UnseenResult(site, kind, gammas, shares, cell(scores)))
    return found


def _at(sweep: Mapping[str, Any], site: str, kind: str) -> tuple[float, Mapping[str, float], float]:
    """γ, the shares of the chosen models, and the score."""
    oracle, chosen = sweep["oracle_gamma"][site], float(sweep["chosen"])
    if kind == "oracle_gamma":
        return oracle["gamma"], oracle["selection"], oracle["score"]
    gamma, score = (0.0, oracle["at_zero"]) if kind == KINDS[0] else (chosen, oracle["at_chosen"])
    return gamma, sweep["test"]["selection"][f"{gamma:g}"][site], score
