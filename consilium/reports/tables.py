"""A comparison of runs as a table: for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from consilium.reports.grouping import Group
from consilium.reports.reading import best_of

if TYPE_CHECKING:
    from rich.table import Table


_ORDER: dict[str, int] = {"bound": 0, "elsewhere": 1, "local": 2, "part": 3, "federated": 3}
WIDE = 118  # columns of a terminal that holds six sites with intervals
MANY = 8  # sites beyond which the means stand before them
_DIGITS = 4  # as in the papers; ties are ties of what is printed

LineKind = Literal["bound", "elsewhere", "local", "part", "federated"]
STATES = {
    "kept": "Optimisers keep their state from round to round.",
    "fresh": "Optimisers start every round without a state.",
}
_MARK = " †"  # behind a method that fixes another state than the table's


@dataclass(frozen=True)
class Column:
    """A column of numbers: one site, or a mean over the sites inside the federation."""

    kind: Literal["site", "site_mean", "pooled", "outside"]
    site: str = ""

    @property
    def title(self) -> str:
        titles = {"site": self.site, "outside": f"{self.site} (outside)", "site_mean": "site mean"}
        return titles.get(self.kind, "pooled cases")


SITE_MEAN, POOLED = Column("site_mean"), Column("pooled")


@dataclass(frozen=True)
class Cell:
    value: float
    sd: float | None = None  # over seeds, if there are several

    def text(self, digits: int = _DIGITS) -> str:
        return f"{self.value:.{digits}f}" + ("" if self.sd is None else f" ± {self.sd:.{digits}f}")


@dataclass(frozen=True)
class TableLine:
    """One row of the table."""

    name: str
    kind: LineKind
    count: int  # seeds
    cells: Mapping[Column, Cell]
    interval: tuple[float, float] | None = None  # 95 %, of the site mean; only with one seed
    state: str = ""  # the optimisers': "kept", "fresh"; empty: not known
    fixed: bool = False  # its method leaves no choice of it

    @property
    def section(self) -> int:
        """Lines of one section stand together."""
        return _ORDER[self.kind]

    @property
    def sites(self) -> frozenset[str]:
        """The sites its means are over."""
        return frozenset(column.site for column in self.cells if column.kind == "site")


@dataclass(frozen=True)
class Comparison:
    """Finished runs in one table, on test cases at the round best on validation."""

    metric: str
    label: str
    columns: tuple[Column, ...]
    lines: tuple[TableLine, ...]
    groups: tuple[Group, ...]
    unfinished: tuple[str, ...]  # names of runs left out
    rows: tuple[dict[str, Any], ...]  # one per run, for JSON
    unlike: tuple[str, ...] = ()  # sites that did not have the same cases in all runs
    unscored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # run → sites that were away at its end
    repeated: tuple[tuple[str, str], ...] = ()  # a run that is another one again, and that one
    state: str = ""  # of the optimisers, where runs of both are shown in tables of their own

    @property
    def states(self) -> tuple[str, ...]:
        """What becomes of the optimisers' state, of methods that leave it to the study."""
        return tuple(dict.fromkeys(line.state for line in self.lines if line.state and not line.fixed))

    def apart(self) -> tuple[Comparison, ...]:
        """One table for each optimiser state: methods are not compared across them.

        A method that fixes its state is in all of them, and marked where it is not that of the table.
        """
        if len(self.states) < 2:
            return (self,)
        found = []
        for state in self.states:
            lines = tuple(line for line in self.lines if line.fixed or line.state in ("", state))
            every = tuple(
                group for group in self.groups
                if group.runs[0].fixes_state or group.runs[0].optimizer_state in ("", state)
            )  # fmt: skip
            found.append(replace(self, lines=lines, groups=every, state=state))
        return tuple(found)

    def best(self, column: Column) -> frozenset[str]:
        """Names of the federated lines that lead a column; none where there is nothing to lead."""
        lines = [line for line in self.lines if line.kind == "federated" and column in line.cells]
        found = {line.name: line.cells[column] for line in lines}
        alike = column.site not in self.unlike if column.site else self._same_cases(lines)
        if len(found) < 2 or not alike or len(self.states) > 1:
            return frozenset()
        top = best_of(self.metric, (round(cell.value, _DIGITS) for cell in found.values()))
        return frozenset(name for name, cell in found.items() if round(cell.value, _DIGITS) == top)

    def _same_cases(self, lines: Sequence[TableLine]) -> bool:
        """Whether means of these lines are over the same cases, so that they can be held against each other."""
        return len({line.sites for line in lines}) < 2 and not self.unlike

    def to_rich(self, width: int = WIDE) -> Table:
        """For a terminal of this width: a narrow one gets three digits, no interval, and of many sites a row each."""
        sections = [line.section for line in self.lines]
        ends = [i for i, section in enumerate(sections) if sections[i + 1 : i + 2] != [section]]
        grid = self.grid(compact=width < WIDE)
        return rich_table(self.title, to_fit(grid, width), self.caption, () if turns(grid, width) else ends)

    def to_markdown(self) -> str:
        parts = [f"{part.title}\n\n{markdown_table(part.grid())}\n\n{part.caption}\n" for part in self.apart()]
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        lines = [
            {
                "name": line.name,
                "kind": line.kind,
                "seeds": line.count,
                **{name: _values(line, kind) for name, kind in (("sites", "site"), ("outside", "outside"))},
                **{
                    key: asdict(line.cells[c])
                    for key, c in (("site_mean", SITE_MEAN), ("pooled", POOLED))
                    if c in line.cells
                },
                "interval": line.interval,
                "optimizer_state": line.state,
            }
            for line in self.lines
        ]
        left_out: dict[str, Any] = {"unfinished": list(self.unfinished), "unlike": list(self.unlike)}
        if self.repeated:
            left_out["repeated"] = [{"run": again, "is": kept} for again, kept in self.repeated]
        if self.unscored:
            left_out["unscored"] = {name: list(sites) for name, sites in self.unscored.items()}
        return {"rows": list(self.rows), "lines": lines, **left_out}

    @property
    def title(self) -> str:
        what = called(self.metric) + ("" if self.label in ("", "mean") else f" of {self.label}")
        several = ", mean over labels" if self.label == "mean" else ""
        only = f", optimiser state {self.state}" if self.state else ""
        return f"Test {what}{several}, at the round best on validation{only}"

    @property
    def caption(self) -> str:
        parts = ["Site mean: every site weighs the same. Pooled cases: every case weighs the same."]
        if any(self.best(column) for column in self.columns):
            parts.append("Bold: the best federated method.")
        if any(line.kind == "part" for line in self.lines):
            parts.append("A super model's own global model is what to hold against FedAvg: the rest is routing's.")
        states = self.states
        if len(states) == 1:
            parts.append(STATES.get(states[0], ""))
        if any(self._marked(line) for line in self.lines):
            parts.append(f"{_MARK.strip()} fixes its optimiser's state otherwise, as its paper does.")
        if any(line.kind == "bound" for line in self.lines):
            parts.append("Pooled training (the bound) needs all data in one place.")
        if len({line.sites for line in self.lines if SITE_MEAN in line.cells}) > 1:
            parts.append("The runs do not have the same sites: their means cannot be compared.")
        if self.unlike:
            parts.append(f"Not the same cases in all runs, and so not to be compared: {', '.join(self.unlike)}.")
        for name, sites in self.unscored.items():
            parts.append(f"{name} has no final scores of {', '.join(sites)}: its means are over the other sites.")
        for again, kept in self.repeated:
            parts.append(f"{again} is {kept} again, the same study, seed and scores: it counts once.")
        if self.unfinished:
            parts.append(f"Not finished and left out: {', '.join(self.unfinished)}.")
        return " ".join(parts)

    def _marked(self, line: TableLine) -> bool:
        return line.fixed and len(self.states) == 1 and line.state not in ("", self.states[0])

    def grid(self, compact: bool = False) -> list[list[TextCell]]:
        """Heads and lines as texts, the same for every way of showing the table."""
        intervals = any(line.interval for line in self.lines) and not compact
        digits = 3 if compact else _DIGITS
        seeds = any(line.count > 1 for line in self.lines)
        head = [TextCell("method")] + ([TextCell("seeds")] if seeds else [])
        for column in self.columns:
            head += [TextCell(column.title)] + (
                [TextCell("95 % interval")] if intervals and column == SITE_MEAN else []
            )
        leaders = {column: self.best(column) for column in self.columns}
        return [head] + [self._line(line, leaders, intervals, seeds, digits) for line in self.lines]

    def _line(
        self, line: TableLine, leaders: Mapping[Column, frozenset[str]], intervals: bool, seeds: bool, digits: int
    ) -> list[TextCell]:
        name = line.name + _MARK * self._marked(line)
        texts = [TextCell(name)] + ([TextCell(str(line.count))] if seeds else [])
        for column in self.columns:
            cell = line.cells.get(column)
            texts.append(
                TextCell(cell.text(digits) if cell else "–", line.kind == "federated" and line.name in leaders[column])
            )
            if intervals and column == SITE_MEAN:
                texts.append(TextCell("{:.3f} – {:.3f}".format(*line.interval) if line.interval else ""))
        return texts


@dataclass(frozen=True)
class TextCell:
    text: str
    bold: bool = False


def called(metric: str) -> str:
    """A score as a reader knows it, with its unit; most are shares of one."""
    if metric.startswith("clean_"):
        return f"{called(metric.removeprefix('clean_'))} after clean-up"
    known = {
        "dice": "Dice", "jaccard": "Jaccard", "hd": "HD (voxels)", "hd95": "HD95 (voxels)", "hd_mm": "HD (mm)",
        "hd95_mm": "HD95 (mm)", "volume_error_abs": "absolute volume error",
        "false_positive_volume": "false positive volume (voxels)",
    }  # fmt: skip
    return known.get(metric, metric.replace("_", " "))


def _values(line: TableLine, kind: str) -> dict[str, Any]:
    return {column.site: asdict(cell) for column, cell in line.cells.items() if column.kind == kind}


def markdown_table(grid: Sequence[Sequence[TextCell]]) -> str:
    """Heads first; names to the left, numbers to the right."""
    escaped = [[_markdown(cell) for cell in row] for row in grid]
    rule = ["---"] + ["---:"] * (len(grid[0]) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (escaped[0], rule, *escaped[1:]))


Grid = Sequence[Sequence[TextCell]]  # heads first
MARGINS = 3, 1  # of `rich_table`: spaces beside every column, and at the edges of the table


def in_order(sites: Sequence[Any], means: Sequence[Any]) -> tuple[Any, ...]:
    """Columns of sites and of means over them; of many sites the means stand first, where a page begins."""
    return (*sites, *means) if len(sites) <= MANY else (*means, *sites)


def to_fit(grid: Grid, width: int, margins: tuple[int, int] = MARGINS) -> Grid:
    """The table, or its rows as columns if only so a terminal of this width holds it with whole numbers.

    Where heads are too long for that they are broken between words here: rich would break the longest cells first.
    """
    shape: Grid = list(zip(*grid, strict=True)) if turns(grid, width, margins) else grid
    if not _needs(shape, margins) <= width < _needs(shape, margins, whole=True):
        return shape
    head = [replace(cell, text=textwrap.fill(cell.text, size)) for cell, size in zip(shape[0], _sizes(shape))]
    return [head, *shape[1:]]


def turns(grid: Grid, width: int, margins: tuple[int, int] = MARGINS) -> bool:
    return _needs(list(zip(*grid, strict=True)), margins) <= width < _needs(grid, margins)


def _needs(grid: Grid, margins: tuple[int, int], whole: bool = False) -> int:
    """The width at which heads break between words only, or not at all, and nothing else breaks."""
    beside, edges = margins
    return edges + sum(size + beside for size in _sizes(grid, whole))


def _sizes(grid: Grid, whole: bool = False) -> list[int]:
    return [max(map(len, _unbroken(column, whole)), default=1) for column in zip(*grid, strict=True)]


def _unbroken(column: Sequence[TextCell], whole: bool) -> Iterator[str]:
    head, *cells = column
    yield from head.text.split("\n" if whole else None)
    for cell in cells:
        yield from cell.text.split("\n")


def rich_table(title: str, grid: Sequence[Sequence[TextCell]], caption: str = "", ends: Container[int] = ()) -> Table:
    """For a terminal; a line is drawn below the rows numbered in `ends`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text as RichText

    table = Table(title=title, caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    for i, cell in enumerate(grid[0]):  # folded, because a number cut short would be another number
        table.add_column(cell.text, justify="right" if i else "left", overflow="fold")
    for number, row in enumerate(grid[1:]):
        texts = [RichText(cell.text, style="bold" if cell.bold else "") for cell in row]
        table.add_row(*texts, end_section=number in ends)
    return table


def _markdown(cell: TextCell) -> str:
    text = cell.text.replace("|", "\\|").replace("\n", " ")
    return f"**{text}**" if cell.bold else text


def show(comparison: Comparison, more: Sequence[Table] = ()) -> None:
    """Print the table and those below it; a file or a pipe gets them whole, a terminal as much as fits."""
    from rich.console import Console

    console = Console()
    width = console.width if console.is_terminal else max(console.width, 160)
    for table in (*(part.to_rich(width) for part in comparison.apart()), *more):
        Console(width=width).print(table)
