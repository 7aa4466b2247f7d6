"""A comparison in the formats of papers and spreadsheets, of another score, and with paired differences."""

from __future__ import annotations

from dataclasses import replace

from consilium.errors import RunError
from consilium.fields import nearest
from consilium.reports.comparing import difference
from consilium.reports.reading import RunView
from consilium.reports.table_texts import csv_table, latex_table
from consilium.reports.tables import Comparison, TextCell, called, markdown_table

FORMATS = ("md", "latex", "csv")


def about_metric(run: RunView, metric: str) -> RunView:
    """A run whose headline is another of its scores: the mean over labels where there is one, else its only label."""
    if not run.summary or run.headline is None:
        return run
    model = run.headline.model
    scores = run.summary["best"]["scores"].get(model, {})
    if metric not in scores:
        raise RunError(f"{run.name} has no score {metric!r} of its {model} model; {nearest(metric, sorted(scores))}")
    labels = scores[metric]
    label = "mean" if "mean" in labels else next(iter(labels))
    headline = {"model": model, "metric": metric, "label": label, **labels[label]}
    return replace(run, summary={**run.summary, "headline": headline})


def difference_grid(comparison: Comparison) -> list[list[TextCell]]:
    """How much higher each method is than the first, on the same test cases; [] where there is nothing to compare."""
    alone = [group for group in comparison.groups if len(group.runs) == 1]
    if len(alone) < 2:
        return []
    first = alone[0]
    rows = []
    for group in alone[1:]:
        found = difference(group.runs[0], first.runs[0])
        if found:
            ends = f"{found['low']:+.4f} to {found['high']:+.4f}"
            p = "< 0.001" if found["p"] < 0.001 else f"{found['p']:.3f}"
            rows.append([group.name, f"{found['difference']:+.4f}", ends, p, str(found["cases"])])
    head = [f"{called(comparison.metric)} minus that of {first.name}", "difference", "95 % interval", "p", "cases"]
    return [[TextCell(text) for text in row] for row in (head, *rows)] if rows else []


def as_text(comparison: Comparison, kind: str) -> str:
    """The tables as Markdown, LaTeX (booktabs) or CSV, the paired differences below."""
    if kind not in FORMATS:
        raise RunError(f"--format {kind}: it is one of {', '.join(FORMATS)}.")
    gaps = difference_grid(comparison)
    if kind == "md":
        return comparison.to_markdown() + (f"\n{markdown_table(gaps)}\n" if gaps else "")
    write = latex_table if kind == "latex" else csv_table
    grids = [part.grid() for part in comparison.apart()] + ([gaps] if gaps else [])
    return "\n".join(write(grid) for grid in grids)
