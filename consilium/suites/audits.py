"""Table S13 of UFPS from audits of a suite's runs: the quality of shadow models and the success of attacks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from consilium.audit.auditing import FILE, FOLDER, AuditOptions, audit, write_audit, write_uncertainty
from consilium.files import read_json
from consilium.reports.reading import RunView
from consilium.reports.tables import TextCell
from consilium.suites.entries import RowRuns
from consilium.suites.rendering import json_papers, markdown_text, rich_tables
from consilium.suites.sections import PaperTable, Suite

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

Audits = Sequence[Mapping[str, Any]]  # of one row, one per seed
MEAN = "mean"
LINES = ("shadow: Dice / HD", "attack, class mean", "attack, members", "AUC", "TPR", "loss threshold: AUC")


@dataclass(frozen=True)
class AuditTable:
    """One row of the suite: figures of every site's model, means over seeds, and the paper's."""

    name: str
    sites: tuple[str, ...]
    lines: Mapping[str, Mapping[str, str]]  # by LINES, then by site or MEAN
    papers: tuple[PaperTable, ...]

    @property
    def title(self) -> str:
        return f"Who was in the training data? {self.name}"

    @property
    def notes(self) -> list[str]:
        return [
            "Shadow attack: how like the target's the shadow's masks are, then accuracy / F1 in per cent, over both "
            "classes and of members alone, as in table S13. HD in voxels. Non-members are test cases of the same site; "
            "the paper's are also of other sites. A dash: too few cases."
        ]

    def grid(self) -> list[list[TextCell]]:
        heads = ["", *self.sites, MEAN]
        body = [[line, *(found.get(site, "–") for site in heads[1:])] for line, found in self.lines.items()]
        return [[TextCell(text) for text in texts] for texts in (heads, *body)]

    def to_rich(self) -> list[RenderableType]:
        return rich_tables(self.title, self.grid(), self.notes, self.papers)

    def to_markdown(self) -> str:
        return markdown_text(self.title, self.grid(), self.notes, self.papers)

    def to_json(self) -> dict[str, Any]:
        lines = {line: dict(found) for line, found in self.lines.items()}
        return {"row": self.name, "lines": lines, "papers": json_papers(self.papers)}


def audit_tables(
    suite: Suite, standings: Sequence[RowRuns], folder: Path, say: Callable[[str], None]
) -> tuple[AuditTable, ...]:
    """One table per row whose runs are finished; runs are audited that were not yet. Figure S5 goes to `folder`."""
    if not suite.heading.audit:
        return ()
    papers = tuple(paper for paper in suite.papers if paper.about == "audit")
    tables, first = [], []
    for standing in standings:
        if not standing.runs:
            continue
        audits = [_audit(run, suite.heading.audit == "quick", say) for run in standing.runs.values()]
        first.append(audits[0])
        tables.append(_table(standing.name, audits, papers if standing is standings[-1] else ()))
    if first:
        write_uncertainty(first, folder)
    return tuple(tables)


def _audit(run: RunView, quick: bool, say: Callable[[str], None]) -> Mapping[str, Any]:
    path = run.folder / FOLDER / FILE
    if path.exists():
        found: dict[str, Any] = read_json(path)
        if quick or not found["quick"]:
            return found
    say(f"auditing {run.name}")
    made = audit(run.folder, AuditOptions(quick), say)
    write_audit(made)
    return made.to_json()


def _table(name: str, audits: Audits, papers: tuple[PaperTable, ...]) -> AuditTable:
    sites = sorted({site for facts in audits for site in _models(facts)})
    numbers = {
        site: [dict(_numbers(_models(facts)[site])) for facts in audits if site in _models(facts)] for site in sites
    }
    lines: dict[str, dict[str, str]] = {line: {} for line in LINES}
    for line, found in lines.items():
        means = {site: _mean([one[line] for one in many if line in one]) for site, many in numbers.items()}
        known = {site: values for site, values in means.items() if values}
        found |= {site: _text(line, values) for site, values in known.items()}
        if known:
            found[MEAN] = _text(line, _mean(list(known.values())))
    return AuditTable(name, tuple(sites), lines, papers)


def _models(facts: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """By site its own model: the teacher as in the paper, else another model of the site."""
    own = [model for model in facts["models"] if "/" in model["model"]]
    teachers = [model for model in own if model["model"].startswith("teacher/")]
    return {model["model"].partition("/")[2]: model for model in reversed(teachers or own)}


def _numbers(model: Mapping[str, Any]) -> Iterator[tuple[str, tuple[float, ...]]]:
    shadow, simple = model["attacks"].get("shadow"), model["attacks"].get("loss threshold")
    if shadow:
        imitation, classes = shadow["imitation"], shadow["by_class"]
        if "dice" in imitation:
            yield LINES[0], (imitation["dice"], *([imitation["hd"]] if "hd" in imitation else []))
        for line, key in zip(LINES[1:3], ("class mean", "member")):
            yield line, (classes[key]["accuracy"], classes[key]["f1"])
        yield LINES[3], (shadow["auc"]["value"],)
        yield LINES[4], (shadow["tpr"]["value"],)
    if simple:
        yield LINES[5], (simple["auc"]["value"],)


def _mean(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.fmean(values) for values in zip(*rows, strict=False))


def _text(line: str, values: Sequence[float]) -> str:
    if line == LINES[0]:
        return f"{100 * values[0]:.2f}" + "".join(f" / {value:.3f}" for value in values[1:])
    if line in LINES[1:3]:
        return " / ".join(f"{100 * value:.2f}" for value in values)
    return f"{values[0]:.3f}"
