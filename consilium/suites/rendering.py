"""How a table of a suite is shown: its cells and notes, then the paper's tables, marked as such."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from consilium.reports.tables import Grid, TextCell, markdown_table, to_fit
from consilium.suites.sections import PaperTable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

MARK = "the paper's figures (their data, their machines)"


def rich_tables(title: str, grid: Grid, notes: Sequence[str], papers: Sequence[PaperTable]) -> list[RenderableType]:
    """For the terminal."""
    theirs = [_rich_table(f"{paper.caption}: {MARK}", _paper_grid(paper), dim=True) for paper in papers]
    return [_rich_table(title, grid, notes), *theirs]


def markdown_text(title: str, grid: Grid, notes: Sequence[str], papers: Sequence[PaperTable]) -> str:
    theirs = [part for p in papers for part in (f"### {p.caption}: {MARK}", markdown_table(_paper_grid(p)))]
    return "\n\n".join([f"## {title}", markdown_table(grid), *notes, *theirs]) + "\n"


def json_papers(papers: Sequence[PaperTable]) -> list[dict[str, Any]]:
    return [{"whose": MARK, **asdict(paper)} for paper in papers]


def _paper_grid(paper: PaperTable) -> list[list[TextCell]]:
    def text(value: float | str) -> TextCell:
        return TextCell((value or "–") if isinstance(value, str) else f"{value:.{paper.digits}f}")

    head = [TextCell("as the paper names it"), *(TextCell(column) for column in paper.columns)]
    return [head, *([TextCell(name), *(text(value) for value in values)] for name, values in paper.rows.items())]


def _rich_table(title: str, grid: Grid, notes: Sequence[str] = (), dim: bool = False) -> RenderableType:
    """A table without title and notes, which a narrow table would break."""
    from rich.console import Group as Together
    from rich.text import Text as RichText

    parts = RichText(f"\n{title}", style="italic"), _Fitting(grid, dim)
    return Together(*parts, *(RichText(note, style="dim") for note in notes))


class _Fitting:
    """A table whose rows are columns where the terminal is too narrow for it."""

    def __init__(self, grid: Grid, dim: bool) -> None:
        self._grid, self._style = grid, "dim" if dim else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        from rich import box
        from rich.table import Table
        from rich.text import Text as RichText

        table = Table(box=box.SIMPLE_HEAD, style=self._style, padding=(0, 1, 0, 0), pad_edge=False)
        head, *body = to_fit(self._grid, options.max_width, margins=(2, 0))
        for i, cell in enumerate(head):  # folded, because a truncated number would be another number
            text = RichText(cell.text, style=self._style)
            table.add_column(text, justify="right" if i else "left", overflow="fold", no_wrap=not i, style=self._style)
        for texts in body:
            table.add_row(*(RichText(text.text, style="bold" if text.bold else "") for text in texts))
        yield table
