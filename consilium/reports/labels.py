"""Label by label: one table per score over all sites, and one per site in the layout of UFPS's tables S2 and S3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from consilium.reports.comparing import cells, part_name
from consilium.reports.grouping import Group
from consilium.reports.reading import RunView, best_of
from consilium.reports.tables import POOLED, SITE_MEAN, Cell, Column, Comparison, TextCell, called
from consilium.scores.means import MEAN
from consilium.scores.rows import CHOSEN

CLEAN = "mean after clean-up"


@dataclass(frozen=True)
class LabelTable:
    """One score, label by label; a line holds site mean and pooled of each label, None where there is none."""

    metric: str
    labels: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    empty: str

    def grid(self) -> list[list[TextCell]]:
        """With one line of heads, for files."""
        heads = [f"{label or 'all'}, {mean}" for label in self.labels for mean in ("site mean", "pooled cases")]
        rows = [[name, *(cell.text() if cell else "–" for cell in found)] for name, found in self.lines]
        return [[TextCell(text) for text in row] for row in (["method", *heads], *rows)]


def label_tables(comparison: Comparison) -> list[LabelTable]:
    """One table per score; the headline score again only if it has several labels."""
    if len(comparison.states) > 1:
        return [
            replace(table, metric=f"{table.metric}, optimiser state {part.state}")
            for part in comparison.apart()
            for table in label_tables(part)
        ]
    found: dict[str, dict[str, None]] = {}
    for group in comparison.groups:
        for metric, labels in _scores(group.runs[0]).items():
            if metric not in ("confidence", "routed") and not metric.startswith(CHOSEN):
                shown = set(labels) - {MEAN} if len(labels) == 2 else labels  # the mean of one label says nothing more
                known = _in_order(group.runs[0], list(shown))
                found.setdefault(metric, {}).update(dict.fromkeys(known))
    return [
        _label_table(comparison, metric, tuple(labels))
        for metric, labels in found.items()
        if metric != comparison.metric or len(labels) > 1
    ]


def _label_table(comparison: Comparison, metric: str, labels: tuple[str, ...]) -> LabelTable:
    lines, empty = [], Counter[str]()
    for group, name, model in _models(comparison):
        texts: list[Cell | None] = []
        for label in labels:
            entries = [_scores(run, model).get(metric, {}).get(label, {}) for run in group.runs]
            found = cells(entries)
            texts += [found.get(SITE_MEAN), found.get(POOLED)]
            empty |= Counter({f"{label} at {site}": n for site, n in entries[0].get("empty", {}).items()})
        lines.append((name, tuple(texts)))
    left_out = ", ".join(f"{n} of {where}" for where, n in sorted(empty.items()))
    return LabelTable(called(metric), labels, tuple(lines), left_out)


@dataclass(frozen=True)
class SiteTable:
    """Methods × labels at one site, or as the mean over sites; with the mean, and the mean of cleaned masks."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    leaders: tuple[frozenset[str], ...]  # by column, the federated methods in bold

    def grid(self) -> list[list[TextCell]]:
        rows = [
            [
                TextCell(name),
                *(
                    TextCell(cell.text() if cell else "–", name in best)
                    for cell, best in zip(found, self.leaders, strict=True)
                ),
            ]
            for name, found in self.lines
        ]
        return [[TextCell("method"), *map(TextCell, self.columns)], *rows]

    def to_json(self) -> dict[str, Any]:
        return {
            name: {column: asdict(cell) for column, cell in zip(self.columns, found, strict=True) if cell}
            for name, found in self.lines
        }


def site_tables(comparison: Comparison) -> dict[str, SiteTable]:
    """By site, then "site mean": the headline score label by label; nothing where there is one label only."""
    if len(comparison.states) > 1:
        return {
            f"{site}, optimiser state {part.state}": replace(
                table, title=f"{table.title}, optimiser state {part.state}"
            )
            for part in comparison.apart()
            for site, table in site_tables(part).items()
        }
    metric = comparison.metric
    labels: dict[str, None] = {}
    for group in comparison.groups:
        known = list(_scores(group.runs[0]).get(metric, {}))
        labels |= dict.fromkeys(_in_order(group.runs[0], known))
    if len([label for label in labels if label not in ("", MEAN)]) < 2:
        return {}
    wanted = {label: (metric, label) for label in labels}
    if any(f"clean_{metric}" in _scores(group.runs[0]) for group in comparison.groups):
        wanted[CLEAN] = (f"clean_{metric}", MEAN)
    columns = [column for column in comparison.columns if column.kind != "pooled"]
    ordered = [column for column in columns if column != SITE_MEAN] + [SITE_MEAN] * (SITE_MEAN in columns)
    return {column.site or column.title: _site_table(comparison, column, wanted) for column in ordered}


def _site_table(comparison: Comparison, column: Column, wanted: dict[str, tuple[str, str]]) -> SiteTable:
    lines = []
    for group, name, model in _models(comparison):
        found = tuple(
            cells(_scores(run, model).get(metric, {}).get(label, {}) for run in group.runs).get(column)
            for metric, label in wanted.values()
        )
        if any(found):
            lines.append((name, found))
    alike = column.site not in comparison.unlike if column.site else not comparison.unlike
    federated = {group.name for group in comparison.groups if group.kind == "federated"}
    leaders = tuple(
        _leaders([(name, found[k]) for name, found in lines if name in federated], comparison.metric, alike)
        for k in range(len(wanted))
    )
    where = "mean over sites" if column == SITE_MEAN else column.title
    return SiteTable(f"Test {called(comparison.metric)}, {where}", tuple(wanted), tuple(lines), leaders)


def _models(comparison: Comparison) -> Iterator[tuple[Group, str, str]]:
    """What has a line: a group, the line's name and the model it is about; empty: the headline's."""
    for group in comparison.groups:
        yield from ((group, part_name(group.name, model), model) for model in group.runs[0].parts)
        yield group, group.name, ""


def _leaders(found: Sequence[tuple[str, Cell | None]], metric: str, alike: bool) -> frozenset[str]:
    known = [(name, round(cell.value, 4)) for name, cell in found if cell]
    if len(known) < 2 or not alike:
        return frozenset()
    top = best_of(metric, (value for _, value in known))
    return frozenset(name for name, value in known if value == top)


def _in_order(run: RunView, labels: Sequence[str]) -> list[str]:
    """In the task's order, which a summary has lost; the mean last."""
    order = list(dict.fromkeys(row.label for row in run.best_rows))
    return sorted(labels, key=lambda label: (label == MEAN, order.index(label) if label in order else -1))


def _scores(run: RunView, model: str = "") -> dict[str, dict[str, Any]]:
    """Metric → label → entry of one model; empty: the headline's."""
    if not run.summary or run.headline is None:
        return {}
    found: dict[str, dict[str, Any]] = run.summary["best"]["scores"].get(model or run.headline.model, {})
    return found
