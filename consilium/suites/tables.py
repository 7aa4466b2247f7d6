"""The table of a suite: mean ± standard deviation over seeds, paired differences, and the paper's figures beside it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from consilium.reports.grouping import Group
from consilium.reports.reading import Headline, RunView
from consilium.reports.tables import POOLED, SITE_MEAN, Cell, Column, Comparison, Line, Text, cells, elsewhere
from consilium.scores import ByCase, Entry, by_case, paired
from consilium.suites.choosing import Choice
from consilium.suites.planning import reference, said
from consilium.suites.reading import PaperTable, Suite

if TYPE_CHECKING:
    from rich.console import RenderableType

MARK = "the paper's figures (their data, their machines)"
_ORDER = {"bound": 0, "elsewhere": 1, "local": 2, "federated": 3}


@dataclass(frozen=True)
class Standing:
    """A row's choice and its finished runs by seed."""

    choice: Choice
    runs: Mapping[int, RunView]

    @property
    def name(self) -> str:
        return self.choice.row.name


@dataclass(frozen=True)
class Difference:
    """How much higher a row's site mean is than the reference's, on the cases and seeds both have."""

    value: float
    sd: float | None  # of the seeds' differences, if there are several
    low: float  # 95 % bootstrap interval over cases, each case averaged over the seeds it was seen in
    high: float
    p: float  # Wilcoxon signed-rank over the cases
    cases: int
    by_seed: Mapping[int, float]

    def text(self) -> str:
        return f"{self.value:+.4f}" + ("" if self.sd is None else f" ± {self.sd:.4f}")


@dataclass(frozen=True)
class SuiteTable:
    """Our table of one label, and the paper's."""

    comparison: Comparison
    standings: Mapping[str, Standing]  # by the name of their line
    differences: Mapping[str, Difference]
    reference: str  # the name of the row the others are compared with
    seeds: int  # asked for
    papers: tuple[PaperTable, ...]

    def grid(self) -> list[list[Text]]:
        """Heads and lines, differences last."""
        head, *body = self.comparison.grid()
        if not self.differences:
            return [head, *body]
        found = [[*head, Text(f"against {self.reference}"), Text("95 % interval")]]
        for line, texts in zip(self.comparison.lines, body, strict=True):
            gap = self.differences.get(line.name)
            found.append(
                [*texts, Text(gap.text() if gap else ""), Text(f"{gap.low:+.4f} to {gap.high:+.4f}" if gap else "")]
            )
        return found

    def notes(self) -> list[str]:
        notes = [self.comparison.caption]
        if self.differences:
            notes.append(
                f"Against {self.reference}: the difference of the site means, paired seed by seed and case by case; "
                "its interval is over cases (bootstrap within each site), its ± over seeds."
            )
        chosen = [
            f"{s.name}: {said(s.choice.chosen)}" for s in self.standings.values() if s.choice.tried and s.choice.chosen
        ]
        if chosen:
            notes.append(f"Chosen on validation cases: {'; '.join(chosen)}.")
        fewer = [f"{s.name} {len(s.runs)}" for s in self.standings.values() if len(s.runs) < self.seeds]
        if fewer:
            notes.append(f"Fewer than {self.seeds} seeds so far: {', '.join(fewer)}.")
        return notes

    def to_rich(self) -> list[RenderableType]:
        """For the terminal: our table, the notes, the paper's tables."""
        body = [[Text(_stacked(text.text), text.bold) for text in texts] for texts in self.grid()]
        ours = _rich(self.comparison.title, body, self.notes())
        return [ours, *(_rich(f"{paper.caption}: {MARK}", _paper_grid(paper), dim=True) for paper in self.papers)]

    def to_markdown(self) -> str:
        parts = [f"## {self.comparison.title}", _markdown(self.grid()), *self.notes()]
        for paper in self.papers:
            parts += [f"### {paper.caption}: {MARK}", _markdown(_paper_grid(paper))]
        return "\n\n".join(parts) + "\n"

    def to_json(self) -> dict[str, Any]:
        lines = []
        for line in self.comparison.to_json()["lines"]:
            standing, gap = self.standings.get(line["name"]), self.differences.get(line["name"])
            facts: dict[str, Any] = {}
            if standing:
                row = standing.choice.row
                runs = {str(seed): run.name for seed, run in standing.runs.items()}
                facts = {"method": row.method, "settings": dict(row.settings), "runs": runs}
                facts["chosen"] = dict(standing.choice.chosen or {})
            gone = {k: v for k, v in line.items() if k != "interval"}
            lines.append({**gone, **facts, "difference": asdict(gap) if gap else None})
        papers = [{"whose": MARK, **asdict(paper)} for paper in self.papers]
        facts = {"label": self.comparison.label, "metric": self.comparison.metric, "reference": self.reference}
        return {**facts, "lines": lines, "papers": papers}


def suite_tables(suite: Suite, standings: Sequence[Standing]) -> tuple[SuiteTable, ...]:
    """One table per label of the suite, of the rows that have a finished run."""
    here = [standing for standing in standings if standing.runs]
    left_out = tuple(standing.name for standing in standings if not standing.runs)
    return tuple(_table(suite, here, left_out, label) for label in suite.heading.labels) if here else ()


def to_markdown(name: str, tables: Sequence[SuiteTable]) -> str:
    parts = [table.to_markdown() for table in tables] or ["No run is finished.\n"]
    return "\n".join([f"# {name}\n", *parts])


def _table(suite: Suite, standings: Sequence[Standing], left_out: tuple[str, ...], label: str) -> SuiteTable:
    views = [run for standing in standings for run in standing.runs.values()]
    columns = _columns(views, label)
    lines: list[Line] = []
    named: dict[str, Standing] = {}
    for standing in standings:
        line = _line(standing, label)
        named[line.name] = standing
        lines += [*_elsewhere_lines(standing, label, columns), line]
    against = reference(suite).name
    base = next((s for s in standings if s.name == against), None)
    gaps = {name: _difference(s, base, label) for name, s in named.items() if base and s is not base}
    lines.sort(key=lambda line: _ORDER[line.kind])
    comparison = Comparison(_about(views[0]).metric, label, columns, tuple(lines), (), left_out, ())
    papers = tuple(paper for paper in suite.papers if paper.label == label)
    found = {name: gap for name, gap in gaps.items() if gap}
    return SuiteTable(comparison, named, found, against, len(suite.heading.seeds), papers)


# -------------------------------------------------------------------------------------------------- numbers


def _about(run: RunView) -> Headline:
    assert run.headline is not None  # finished runs have one
    return run.headline


def _entry(run: RunView, label: str) -> Entry:
    return run.entry(_about(run).model, _about(run).metric, label)


def _line(standing: Standing, label: str) -> Line:
    runs = list(standing.runs.values())
    kind = runs[0].kind
    name = {"bound": f"{standing.name} (bound)", "local": f"{standing.name} (own site)"}.get(kind, standing.name)
    return Line(name, kind, len(runs), cells(_entry(run, label) for run in runs))


def _elsewhere_lines(standing: Standing, label: str, columns: Sequence[Column]) -> Iterator[Line]:
    """One site's own model at every site, a row each, as in the paper's table 3."""
    runs = list(standing.runs.values())
    if runs[0].kind != "local":
        return
    title = standing.name.replace("Local", "local", 1)
    owners = elsewhere(Group(standing.name, "local", tuple(runs)))
    for of in [column.site for column in columns if column.site in owners]:
        yield Line(f"{of} {title}", "elsewhere", len(runs), cells(_owned(run, label, of) for run in runs))


def _owned(run: RunView, label: str, of: str) -> Entry:
    found = by_case(run.best_rows, _about(run).model, _about(run).metric, label, "test", of)
    sites = {site: statistics.fmean(cases.values()) for site, cases in found.items()}
    if not sites:
        return Entry()
    every = [value for cases in found.values() for value in cases.values()]
    return Entry(sites=sites, site_mean=statistics.fmean(sites.values()), pooled=statistics.fmean(every))


def _difference(row: Standing, base: Standing, label: str) -> Difference | None:
    both = [seed for seed in row.runs if seed in base.runs]
    found = paired(_over_seeds(row, both, label), _over_seeds(base, both, label))
    if found is None:
        return None
    by_seed = {
        seed: _entry(row.runs[seed], label)["site_mean"] - _entry(base.runs[seed], label)["site_mean"] for seed in both
    }
    sd = statistics.stdev(by_seed.values()) if len(by_seed) > 1 else None
    return Difference(found.difference, sd, found.low, found.high, found.p, found.cases, by_seed)


def _over_seeds(standing: Standing, seeds: Sequence[int], label: str) -> ByCase:
    """Site → case → mean over seeds; a case of another federation is another patient, whatever its name."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in seeds:
        run = standing.runs[seed]
        data = str(run.study.get("data", {}).get("federation", ""))
        for site, cases in by_case(run.best_rows, _about(run).model, _about(run).metric, label, "test").items():
            for case, value in cases.items():
                values[site][f"{data}/{case}"].append(value)
    return {site: {case: statistics.fmean(v) for case, v in cases.items()} for site, cases in values.items()}


def _columns(runs: Sequence[RunView], label: str) -> tuple[Column, ...]:
    """The study's order of sites where it gives one."""
    inside = dict.fromkeys(site for run in runs for site in run.study.get("study", {}).get("sites", []))
    inside |= dict.fromkeys(site for run in runs for site in _entry(run, label).get("sites", {}))
    outside = dict.fromkeys(site for run in runs for site in _entry(run, label).get("outside", {}))
    sites = [Column("site", site) for site in inside]
    return (*sites, SITE_MEAN, POOLED, *(Column("outside", site) for site in outside))


# -------------------------------------------------------------------------------------------------- shown


def _paper_grid(paper: PaperTable) -> list[list[Text]]:
    def text(value: float | str) -> Text:
        return Text((value or "–") if isinstance(value, str) else f"{value:.4f}")

    head = [Text("as the paper names it"), *(Text(column) for column in paper.columns)]
    return [head, *([Text(name), *(text(value) for value in values)] for name, values in paper.rows.items())]


def _stacked(text: str) -> str:
    """On two lines, so that a table of eight columns fits a terminal."""
    return text.replace(" ± ", "\n± ").replace(" to ", " to\n")


def _rich(title: str, grid: Sequence[Sequence[Text]], notes: Sequence[str] = (), dim: bool = False) -> RenderableType:
    """Title and notes stand outside the table, so that a narrow one does not break them."""
    from rich import box
    from rich.console import Group as Together
    from rich.table import Table
    from rich.text import Text as RichText

    style = "dim" if dim else ""
    table = Table(box=box.SIMPLE_HEAD, style=style, padding=(0, 1, 0, 0), pad_edge=False)
    head, *body = grid
    for i, cell in enumerate(head):  # folded, because a number cut short would be another number
        table.add_column(
            RichText(cell.text), justify="right" if i else "left", overflow="fold", no_wrap=not i, style=style
        )
    for texts in body:
        table.add_row(*(RichText(text.text, style="bold" if text.bold else "") for text in texts))
    return Together(RichText(f"\n{title}", style="italic"), table, *(RichText(note, style="dim") for note in notes))


def _markdown(grid: Sequence[Sequence[Text]]) -> str:
    def text(cell: Text) -> str:
        plain = cell.text.replace("|", "\\|").replace("\n", " ")
        return f"**{plain}**" if cell.bold else plain

    head, *body = [[text(cell) for cell in texts] for texts in grid]
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(texts) + " |" for texts in (head, rule, *body))


__all__ = ["MARK", "Cell", "Difference", "Standing", "SuiteTable", "suite_tables", "to_markdown"]
