"""The scores of a model on labelled cases: on a terminal, and on one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from consilium.errors import DataError
from consilium.evaluation import EvaluatedScore, Evaluation, SiteScore
from consilium.reports.check_figures import strips
from consilium.reports.embedding import EmbeddedImage, embedded
from consilium.reports.reading import lower_is_better
from consilium.reports.rendering import write_html
from consilium.reports.style import FAINT, PALETTE, sheet
from consilium.reports.tables import TextCell, called, in_order, rich_table, to_fit
from consilium.scores.classes import ClassReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST = ("dice", "accuracy")  # the scores that the page begins with
WORST = 10  # cases listed


def show_evaluation(found: Evaluation) -> None:
    """Print the tables."""
    from rich.console import Console

    console = Console()
    width = console.width if console.is_terminal else max(console.width, 160)
    scores = (to_fit(grid, width) for grid in score_grids(found))
    tables = [("Scores, with 95 % intervals over cases", grid) for grid in scores]
    tables += [(title, grid) for title, grid in class_grids(found)]
    for title, grid in tables:
        Console(width=width).print(rich_table(title, grid))


def score_grids(found: Evaluation) -> Iterator[list[list[TextCell]]]:
    """Scores as lines, sites as columns, of many sites behind the means; of many scores one table."""
    sites = list(dict.fromkeys(site for score in found.scores for site in score.sites))

    def row(first: list[str], by_site: list[str], means: list[str]) -> list[TextCell]:
        return [TextCell(text) for text in (*first, *in_order(by_site, means))]

    scores = (
        row(
            [called(s.metric), s.label],
            [_text(s.sites.get(site)) for site in sites],
            [_text(s.site_mean), _number(s.pooled)],
        )
        for s in _ordered(found.scores)
    )
    yield [row(["score", "label"], sites, ["site mean", "pooled cases"]), *scores]


def class_grids(found: Evaluation) -> Iterator[tuple[str, list[list[TextCell]]]]:
    """Class by class, and the confusion matrix, of all cases."""
    report = found.classes.get("")
    if report is None:
        return
    head = ["class", "cases", "sensitivity", "specificity", "AUC", "95 % interval"]
    rows = [
        [label, str(one.cases), *map(_number, (one.sensitivity, one.specificity, one.auc)), _ends(one.auc_interval)]
        for label, one in zip(report.labels, report.classes, strict=True)
    ]
    yield "Class by class, all cases", [[TextCell(text) for text in row] for row in (head, *rows)]
    names = [f"said {label}" for label in report.labels]
    confusion = [[label, *map(str, row)] for label, row in zip(report.labels, report.confusion, strict=True)]
    yield (
        f"Confusion: true classes in rows. Accuracy {report.accuracy:.4f} ({_ends(report.accuracy_interval)}), AUC "
        f"{_number(report.auc)}, expected calibration error {report.ece:.4f}",
        [[TextCell(text) for text in row] for row in (["truly", *names], *confusion)],
    )


def _ordered(scores: Sequence[EvaluatedScore]) -> list[EvaluatedScore]:
    return sorted(scores, key=lambda s: (s.metric not in FIRST, s.metric, s.label != "mean"))


def _text(score: SiteScore | None) -> str:
    if score is None:
        return "–"
    return f"{score.mean:.4f}" + (f" ({ends})" if (ends := _ends((score.low, score.high))) else "")


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.4f}"


def _ends(ends: tuple[float | None, float | None] | None) -> str:
    low, high = ends or (None, None)
    return "" if low is None or high is None else f"{low:.3f} – {high:.3f}"


# ---------------------------------------------------------------------------------------------- the page


def write_evaluation_page(found: Evaluation, run: str, to: Path) -> None:
    """Write the page; the file appears whole or not at all."""
    write_html("evaluation.html", _content(found, run), to, DataError)


def _content(found: Evaluation, run: str) -> dict[str, Any]:
    main = _ordered(found.scores)[0]
    report = found.classes.get("")
    sites = f"{len(main.sites)} site{'s' * (len(main.sites) != 1)}"
    mean = main.site_mean
    cases = f"{len(found.cases)} case{'s' * (len(found.cases) != 1)}"
    spread = f" (95 % interval {mean.low:.3f} to {mean.high:.3f})" if None not in (mean.low, mean.high) else ""
    lead = f"Over {sites} and {cases}: {called(main.metric)} {mean.mean:.3f}{spread}."
    return {
        "title": f"{run} on {Path(found.federation).name}, {found.split} cases",
        "lead": lead,
        "warning": found.warning,
        "grids": [("", grid) for grid in score_grids(found)],
        "class_grids": list(class_grids(found)),
        "strip": None if report else _strip(found, main),
        "calibration": embedded(calibration(report), "Accuracy against confidence") if report else None,
        "roc": embedded(roc(found, report), "ROC curves, one per class") if report else None,
        "worst": _worst(found, main),
        "worst_of": called(main.metric) + (f" of {main.label}" if main.label not in ("mean", "class") else ""),
    }


def _case_values(found: Evaluation, score: EvaluatedScore) -> list[tuple[str, str, float, str]]:
    rows = []
    for case in found.cases:
        values = [s.value for s in case.scores if s.metric == score.metric and score.label in (s.label, "mean")]
        if values:
            rows.append((case.site, case.case, sum(values) / len(values), case.model))
    return rows


def _worst(found: Evaluation, score: EvaluatedScore) -> list[tuple[str, str, str, str]]:
    if found.classes:  # the surest mistakes
        wrong = [c for c in found.cases if c.truth is not None and int(np.argmax(c.chances)) != c.truth]
        wrong.sort(key=lambda c: -max(c.chances))
        labels = found.classes[""].labels
        said = [
            f"truly {labels[c.truth or 0]}, said {labels[int(np.argmax(c.chances))]} {max(c.chances):.3f}"
            for c in wrong
        ]
        return [(c.site, c.case, text, c.model) for c, text in zip(wrong, said, strict=True)][:WORST]
    rows = sorted(_case_values(found, score), key=lambda row: row[2], reverse=lower_is_better(score.metric))
    return [(site, case, f"{value:.4f}", model) for site, case, value, model in rows[:WORST]]


def _strip(found: Evaluation, score: EvaluatedScore) -> EmbeddedImage:
    labels = [s for s in found.scores if s.metric == score.metric and s.label != "mean"]
    panels = {
        f"{called(one.metric)}, {one.label}": {
            site: [value for at, _, value, _ in _case_values(found, one) if at == site] for site in one.sites
        }
        for one in labels
    }
    return embedded(strips(panels), f"{called(score.metric)} of every case, site by site")


def calibration(report: ClassReport) -> Figure:
    """How often the model is right, against how sure it says it is; a dot's area is its cases."""
    with sheet(height=3.4, width=4.6) as figure:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=0.8, linestyle="dashed")
        sizes = [20 + 400 * one.cases / report.cases for one in report.calibration]
        sure, right = [b.confidence for b in report.calibration], [b.accuracy for b in report.calibration]
        axes.scatter(sure, right, sizes, color=PALETTE[0], alpha=0.8)
        axes.set(xlim=(0, 1.02), ylim=(-0.02, 1.02), xlabel="confidence", ylabel="share of cases that are right")
        axes.set_title(f"Calibration error {report.ece:.3f}")
        return figure


def roc(found: Evaluation, report: ClassReport) -> Figure:
    """Sensitivity against 1 − specificity, every class against the rest."""
    from sklearn.metrics import roc_curve

    told = [case for case in found.cases if case.truth is not None]
    chances = np.array([case.chances for case in told])
    truth = np.array([case.truth for case in told])
    with sheet(height=3.4, width=5.4) as figure:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=0.8, linestyle="dashed")
        for i, label in enumerate(report.labels):
            area = report.classes[i].auc
            if area is not None:
                false, true, _ = roc_curve(truth == i, chances[:, i])
                axes.plot(false, true, color=PALETTE[i % len(PALETTE)], label=f"{label} {area:.3f}")
        axes.set(xlabel="1 − specificity", ylabel="sensitivity", title="ROC, AUC per class")
        if len(report.labels) <= 12:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
        return figure
