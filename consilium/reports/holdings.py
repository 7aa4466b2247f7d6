"""Who holds which class: a table, and the picture of the APPLE paper's figures 4 and 5."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from consilium.data.partition import Holdings
from consilium.reports.style import FAINT, PALETTE, sheet

LARGEST = 420.0  # points², the area of the largest dot


def write_table(held: Holdings, path: Path) -> None:
    """A line for every site and class it holds."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["site", "class", "train", "valid", "test"])
        for site, classes in held.items():
            table.writerows(
                [site, label, *splits.values()] for label, splits in classes.items() if any(splits.values())
            )


def draw(held: Holdings, path: Path) -> None:
    """A dot for every site (column) and class (row), its area the number of training cases."""
    sites, labels = list(held), list(next(iter(held.values())))
    counts = np.array([[held[site][label]["train"] for site in sites] for label in labels], dtype=float)
    most = max(1.0, float(counts.max()))
    with sheet(height=1.5 + 0.34 * len(labels), width=min(16.0, 2.8 + 0.62 * len(sites))) as figure:
        axes = figure.subplots()
        rows, columns = np.nonzero(counts)
        axes.scatter(columns, rows, s=LARGEST * counts[rows, columns] / most, color=PALETTE[0], linewidths=0)
        for column, total in enumerate(counts.sum(axis=0)):
            axes.text(column, -0.75, f"{total:.0f}", ha="center", va="bottom", color=FAINT, fontsize=8)
        axes.set_xticks(range(len(sites)), sites, rotation=45 if len(sites) > 6 else 0)
        axes.set_yticks(range(len(labels)), labels)
        axes.set(xlim=(-0.6, len(sites) - 0.4), ylim=(len(labels) - 0.4, -0.6))
        axes.grid()
        axes.set_title(f"Training cases by site and class; the largest dot is {most:.0f}", pad=18)
        figure.savefig(path, dpi=144)
