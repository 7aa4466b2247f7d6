"""The table of a suite: mean ± standard deviation over seeds, paired differences, and the paper's figures beside it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from consilium.reports.grouping import Group
from consilium.reports.reading import Headline, RunView
from consilium.reports.tables import (
    POOLED,
    SITE_MEAN,
    Cell,
    Column,
    Comparison,
    Line,
    Text,
    cells,
    elsewhere,
    part_name,
)
from consilium.scores import ByCase, Entry, by_case, paired
from consilium.suites.choosing import Choice
from consilium.suites.planning import LEAVE_OUT, reference, said, without
from consilium.suites.reading import STATE, PaperTable, Suite

if TYPE_CHECKING:
    from rich.console import RenderableType

MARK = "the paper's figures (their data, their machines)"
UNSEEN = (
    "Sites are left out in turn: a column is the score at a site nobody trained on, of models trained at the others, "
    "at the round best on the others' validation cases."
)


@dataclass(frozen=True)
class Standing:
    """A row's choice and its finished runs by seed."""

    choice: Choice
    runs: Mapping[int, RunView]

    @property
    def name(self) -> str:
        return self.choice.row.name


@dataclass(frozen=True)
class Entrant:
    """A line of the table: one row of the suite or, where sites are left out in turn, a row for each turn."""

    name: str
    standings: tuple[Standing, ...]
    unseen: bool  # scored at the sites left out
    model: str = ""  # a part of the method's model, with a line of its own; empty: the headline's

    @property
    def parts(self) -> list[Entrant]:
        """Lines for the parts of a super model that tables show."""
        return [replace(self, name=part_name(self.name, model), model=model) for model in self.runs[0].parts]

    def about(self, run: RunView) -> Headline:
        return replace(_about(run), model=self.model) if self.model else _about(run)

    @property
    def runs(self) -> list[RunView]:
        return [run for standing in self.standings for run in standing.runs.values()]

    @property
    def seeds(self) -> list[int]:
        """Those of which every turn is finished: means over different sites cannot be compared."""
        first, *rest = (standing.runs for standing in self.standings)
        return [seed for seed in first if all(seed in runs for runs in rest)]

    def entry(self, seed: int, label: str) -> Entry:
        if not self.unseen:
            run = self.standings[0].runs[seed]
            return run.entry(self.about(run).model, self.about(run).metric, label)
        found = self.cases([seed], label)
        sites = {site: statistics.fmean(cases.values()) for site, cases in found.items()}
        if not sites:
            return Entry()
        every = [value for cases in found.values() for value in cases.values()]
        return Entry(outside=sites, site_mean=statistics.fmean(sites.values()), pooled=statistics.fmean(every))

    def cases(self, seeds: Sequence[int], label: str) -> ByCase:
        """Site → case → mean over seeds; a case of another federation is another patient, whatever its name."""
        values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for run in (standing.runs[seed] for standing in self.standings for seed in seeds):
            data, about = str(run.study.get("data", {}).get("federation", "")), self.about(run)
            rows = by_case(run.best_rows, about.model, about.metric, label, "test", outside=self.unseen)
            for site, cases in rows.items():
                for case, value in cases.items():
                    values[site][f"{data}/{case}"].append(value)
        return {site: {case: statistics.fmean(v) for case, v in cases.items()} for site, cases in values.items()}


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
    entrants: Mapping[str, Entrant]  # by the name of their line
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
        standings = [s for entrant in self.entrants.values() if not entrant.model for s in entrant.standings]
        unseen = any(entrant.unseen for entrant in self.entrants.values())
        notes = [UNSEEN] * unseen + [self.comparison.caption]
        if self.differences:
            notes.append(
                f"Against {self.reference}: the difference of the site means, paired seed by seed and case by case; "
                "its interval is over cases (bootstrap within each site), its ± over seeds."
            )
        chosen = [f"{s.name}: {said(s.choice.chosen)}" for s in standings if s.choice.tried and s.choice.chosen]
        if chosen:
            notes.append(f"Chosen on validation cases: {'; '.join(chosen)}.")
        fewer = [f"{s.name} {len(s.runs)}" for s in standings if 0 < len(s.runs) < self.seeds]
        if fewer:
            notes.append(f"Fewer than {self.seeds} seeds so far: {', '.join(fewer)}.")
        return notes

    def to_rich(self) -> list[RenderableType]:
        """For the terminal: our table, the notes, the paper's tables."""
        body = [[Text(_stacked(text.text), text.bold) for text in texts] for texts in self.grid()]
        ours = rich_table(self.comparison.title, body, self.notes())
        return [ours, *rich_papers(self.papers)]

    def to_markdown(self) -> str:
        parts = [f"## {self.comparison.title}", markdown_table(self.grid()), *self.notes()]
        return "\n\n".join([*parts, *markdown_papers(self.papers)]) + "\n"

    def to_json(self) -> dict[str, Any]:
        lines = []
        for line in self.comparison.to_json()["lines"]:
            entrant, gap = self.entrants.get(line["name"]), self.differences.get(line["name"])
            turns = [_facts(standing) for standing in entrant.standings] if entrant else []
            facts = {"turns": turns} if entrant and entrant.unseen else next(iter(turns), {})
            gone = {k: v for k, v in line.items() if k != "interval"}
            lines.append({**gone, **facts, "difference": asdict(gap) if gap else None})
        papers = json_papers(self.papers)
        facts = {"label": self.comparison.label, "metric": self.comparison.metric, "reference": self.reference}
        return {**facts, "lines": lines, "papers": papers}


def suite_tables(suite: Suite, standings: Sequence[Standing]) -> tuple[SuiteTable, ...]:
    """One table per label, of the rows that have a finished run; of each label one per optimiser state in the grid."""
    found = []
    for state, here in by_state(suite, standings):
        entrants = _entrants(here)
        left_out = tuple(standing.name for standing in here if not standing.runs)
        if entrants:
            found += [_table(suite, entrants, left_out, label, state) for label in suite.heading.labels]
    return tuple(found)


def by_state(suite: Suite, standings: Sequence[Standing]) -> Iterator[tuple[str, list[Standing]]]:
    """An optimiser state of the grid and its rows, which have tables of their own; without one: empty, and all rows.

    A method that fixes its state is in all tables: the grid does not vary it there.
    """
    for state in suite.grid.get(STATE, ("",)):
        yield state, [s for s in standings if not state or s.choice.row.settings.get(STATE, state) == state]


def _table(
    suite: Suite, entrants: Sequence[Entrant], left_out: tuple[str, ...], label: str, state: str = ""
) -> SuiteTable:
    columns = _columns(entrants, label)
    lines: list[Line] = []
    named: dict[str, Entrant] = {}
    for entrant in entrants:
        lines += _elsewhere_lines(entrant, label, columns)
        for one in (*entrant.parts, entrant):
            line = _line(one, label)
            named[line.name] = one
            lines.append(line)
    against = without(without(reference(suite), LEAVE_OUT), STATE).name
    base = next((entrant for entrant in entrants if entrant.name == against), None)
    gaps = {name: difference(e, base, label) for name, e in named.items() if base and e is not base}
    lines.sort(key=lambda line: line.section)
    metric = _about(entrants[0].runs[0]).metric
    comparison = Comparison(metric, label, columns, tuple(lines), (), left_out, (), state=state)
    papers = tuple(paper for paper in suite.papers if paper.label == label and paper.about == "scores")
    found = {name: gap for name, gap in gaps.items() if gap}
    return SuiteTable(comparison, named, found, against, len(suite.heading.seeds), papers)


def _entrants(standings: Sequence[Standing]) -> list[Entrant]:
    """Rows that differ only in who is left out are one line; a line without a finished run is not there."""
    turns: dict[str, list[Standing]] = defaultdict(list)
    for standing in standings:
        turns[without(without(standing.choice.row, LEAVE_OUT), STATE).name].append(standing)
    found = [Entrant(name, tuple(s), LEAVE_OUT in s[0].choice.row.settings) for name, s in turns.items()]
    return [entrant for entrant in found if entrant.runs]


def _facts(standing: Standing) -> dict[str, Any]:
    row = standing.choice.row
    runs = {str(seed): run.name for seed, run in standing.runs.items()}
    facts = {"method": row.method, "settings": dict(row.settings), "runs": runs}
    return {**facts, "chosen": dict(standing.choice.chosen or {})}


# -------------------------------------------------------------------------------------------------- numbers


def _about(run: RunView) -> Headline:
    assert run.headline is not None  # finished runs have one
    return run.headline


def _entry(run: RunView, label: str) -> Entry:
    return run.entry(_about(run).model, _about(run).metric, label)


def _line(entrant: Entrant, label: str) -> Line:
    run = entrant.runs[0]
    kind = run.kind
    name = {"bound": f"{entrant.name} (bound)", "local": f"{entrant.name} (own site)"}.get(kind, entrant.name)
    seeds = entrant.seeds
    found = cells(entrant.entry(seed, label) for seed in seeds)
    if not seeds:  # no seed has all turns: what there is, site by site
        found = _single_turns(entrant, label)
    return Line(
        name,
        "part" if entrant.model else kind,
        len(seeds),
        found,
        state=run.optimizer_state,
        fixed=run.fixes_state,
    )


def _single_turns(entrant: Entrant, label: str) -> dict[Column, Cell]:
    each = [replace(entrant, standings=(standing,)) for standing in entrant.standings]
    found = [cells(one.entry(seed, label) for seed in one.seeds) for one in each]
    return {column: cell for part in found for column, cell in part.items() if column.kind == "outside"}


def _elsewhere_lines(entrant: Entrant, label: str, columns: Sequence[Column]) -> Iterator[Line]:
    """One site's own model at every site, a row each, as in the paper's table 3."""
    runs = entrant.runs
    if runs[0].kind != "local" or entrant.unseen:
        return
    title = entrant.name.replace("Local", "local", 1)
    owners = elsewhere(Group(entrant.name, "local", tuple(runs)))
    for of in [column.site for column in columns if column.site in owners]:
        found = cells(_owned(run, label, of) for run in runs)
        yield Line(f"{of} {title}", "elsewhere", len(runs), found, state=runs[0].optimizer_state)


def _owned(run: RunView, label: str, of: str) -> Entry:
    found = by_case(run.best_rows, _about(run).model, _about(run).metric, label, "test", of)
    sites = {site: statistics.fmean(cases.values()) for site, cases in found.items()}
    if not sites:
        return Entry()
    every = [value for cases in found.values() for value in cases.values()]
    return Entry(sites=sites, site_mean=statistics.fmean(sites.values()), pooled=statistics.fmean(every))


def difference(row: Entrant, base: Entrant, label: str) -> Difference | None:
    """Of two lines of a table, on the cases and seeds both have; None if there are none."""
    both = [seed for seed in row.seeds if seed in base.seeds]
    found = paired(row.cases(both, label), base.cases(both, label))
    if found is None:
        return None
    by_seed = {seed: row.entry(seed, label)["site_mean"] - base.entry(seed, label)["site_mean"] for seed in both}
    sd = statistics.stdev(by_seed.values()) if len(by_seed) > 1 else None
    return Difference(found.difference, sd, found.low, found.high, found.p, found.cases, by_seed)


def _columns(entrants: Sequence[Entrant], label: str) -> tuple[Column, ...]:
    """The study's order of sites where it gives one; of sites left out in turn, the grid's."""
    turns = [standing.choice.row.settings[LEAVE_OUT] for e in entrants if e.unseen for standing in e.standings]
    if turns:
        return (
            *(Column("outside", site) for site in dict.fromkeys(site for turn in turns for site in turn)),
            SITE_MEAN,
            POOLED,
        )
    runs = [run for entrant in entrants for run in entrant.runs]
    inside = dict.fromkeys(site for run in runs for site in run.study.get("study", {}).get("sites", []))
    inside |= dict.fromkeys(site for run in runs for site in _entry(run, label).get("sites", {}))
    outside = dict.fromkeys(site for run in runs for site in _entry(run, label).get("outside", {}))
    sites = [Column("site", site) for site in inside]
    return (*sites, SITE_MEAN, POOLED, *(Column("outside", site) for site in outside))


# -------------------------------------------------------------------------------------------------- shown


def rich_papers(papers: Sequence[PaperTable]) -> list[RenderableType]:
    return [rich_table(f"{paper.caption}: {MARK}", _paper_grid(paper), dim=True) for paper in papers]


def markdown_papers(papers: Sequence[PaperTable]) -> list[str]:
    return [part for p in papers for part in (f"### {p.caption}: {MARK}", markdown_table(_paper_grid(p)))]


def json_papers(papers: Sequence[PaperTable]) -> list[dict[str, Any]]:
    return [{"whose": MARK, **asdict(paper)} for paper in papers]


def _paper_grid(paper: PaperTable) -> list[list[Text]]:
    def text(value: float | str) -> Text:
        return Text((value or "–") if isinstance(value, str) else f"{value:.{paper.digits}f}")

    head = [Text("as the paper names it"), *(Text(column) for column in paper.columns)]
    return [head, *([Text(name), *(text(value) for value in values)] for name, values in paper.rows.items())]


def _stacked(text: str) -> str:
    """On two lines, so that a table of eight columns fits a terminal."""
    return text.replace(" ± ", "\n± ").replace(" to ", " to\n")


def rich_table(
    title: str, grid: Sequence[Sequence[Text]], notes: Sequence[str] = (), dim: bool = False
) -> RenderableType:
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


def markdown_table(grid: Sequence[Sequence[Text]]) -> str:
    def text(cell: Text) -> str:
        plain = cell.text.replace("|", "\\|").replace("\n", " ")
        return f"**{plain}**" if cell.bold else plain

    head, *body = [[text(cell) for cell in texts] for texts in grid]
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(texts) + " |" for texts in (head, rule, *body))
