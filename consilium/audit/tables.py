"""An audit as a table, from its JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADS = (
    "model", "attack", "members", "non-members", "AUC", "TPR", "at FPR", "class mean", "member class",
    "non-member class", "verdict",
)  # fmt: skip


def rows(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each attack on each model; accuracy / F1 in percent as in table S13."""
    found: list[tuple[str, ...]] = []
    for model in facts["models"]:
        name = model["model"] + (" (stays at its site)" if model["stays_at_its_site"] else "")
        for attack, figures in model["attacks"].items():
            classes = figures.get("by_class")
            found.append((
                name, attack, str(figures["members"]), str(figures["non_members"]),
                _interval(figures["auc"]), _interval(figures["tpr"]), f"{100 * figures['fpr']:.0f} %",
                _pair(classes, "class mean"), _pair(classes, "member"), _pair(classes, "non-member"),
                figures["verdict"],
            ))  # fmt: skip
            name = ""
        for attack, why in model["skipped"].items():
            found.append((name, attack, *["–"] * 8, f"not made: {why}"))
            name = ""
    return found


def markdown(facts: Mapping[str, Any]) -> str:
    """The table with its bar, for a file."""
    lines = [f"# Audit of {facts['run']}", "", facts["bar"], "Classes: accuracy / F1 in percent.", ""]
    lines += [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)]
    lines += [f"| {' | '.join(row)} |" for row in rows(facts)]
    return "\n".join([*lines, ""])


def show(facts: Mapping[str, Any]) -> None:
    """Print the table on a terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(
        box=None, title=f"Who was in the training data of {facts['run']}?", title_justify="left", pad_edge=False
    )
    for head in ("model", "attack", "AUC", "TPR at FPR", "verdict"):
        table.add_column(head, overflow="fold")
    for row in rows(facts):
        table.add_row(*row[:2], row[4], f"{row[5].split(' ')[0]} at {row[6]}" if row[6] != "–" else "–", row[-1])
    console.print(table)
    console.print(facts["bar"], soft_wrap=True)


def _interval(part: Mapping[str, float]) -> str:
    return f"{part['value']:.2f} ({part['low']:.2f} to {part['high']:.2f})"


def _pair(classes: Mapping[str, Any] | None, name: str) -> str:
    return "–" if classes is None else f"{100 * classes[name]['accuracy']:.1f} / {100 * classes[name]['f1']:.1f}"
