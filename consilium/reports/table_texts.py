"""A table in the formats of papers and spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from consilium.reports.tables import TextCell

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "±": r"$\pm$", "–": "--",
    "†": r"$\dagger$", "ε": r"$\varepsilon$", "×": r"$\times$",
}  # fmt: skip


def latex_table(grid: Sequence[Sequence[TextCell]]) -> str:
    """With the lines of booktabs; what is bold stays bold."""
    head, *rows = [" & ".join(_latex_cell(cell) for cell in row) + r" \\" for row in grid]
    columns = "l" + "r" * (len(grid[0]) - 1)
    inside = "\n".join(rows)
    return f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{head}\n\\midrule\n{inside}\n\\bottomrule\n\\end{{tabular}}\n"


def _latex_cell(cell: TextCell) -> str:
    text = "".join(_LATEX.get(letter, letter) for letter in cell.text)
    return f"\\textbf{{{text}}}" if cell.bold else text


def csv_table(grid: Sequence[Sequence[TextCell]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([cell.text for cell in row] for row in grid)
    return text.getvalue()
