"""Chooses the analyses for runs and writes their files: figures, numbers as JSON, tables as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from consilium.analysis import (
    ablation,
    agreement,
    features,
    gallery,
    gamma_sweep,
    hessian,
    label_curves,
    lambda_sweep,
    landscape,
    loss_surface,
    overlays,
    progress,
    pseudo_labels,
    relationships,
    schedules,
    similarity,
    steepness,
)
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import Runs
from consilium.errors import StudyError
from consilium.fields import nearest
from consilium.files import write_json, writing_into
from consilium.reports.grouping import groups
from consilium.reports.relationships import has_relationships
from consilium.reports.style import to_bytes
from consilium.tasks.segmentation import Segmentation


@dataclass(frozen=True)
class Analysis:
    """The function of an analysis, and whether it is a default for given runs; slow ones never are."""

    make: Callable[[Runs, Options, Say], Iterable[Finding]]
    suits: Callable[[Runs], bool]


def analyse(
    paths: Sequence[Path],
    what: Sequence[str] = (),
    to: Path | None = None,
    options: Options | None = None,
    say: Say = lambda _: None,
) -> list[Path]:
    """Make the named analyses, or all defaults for the runs; returns the written files.

    The files go into `to`, else into `analysis/` of the run (of the first run, if an analysis covers several).
    """
    for name in what:
        if name not in ANALYSES:
            raise StudyError(f"there is no analysis '{name}'; {nearest(name, list(ANALYSES))}")
    runs, options = Runs(paths), options or Options()
    known = sorted({site for view in runs.views for site in view.origin.get("sites", {})})
    if options.site and known and options.site not in known:
        raise StudyError(f"there is no site '{options.site}'; the runs have {', '.join(known)}.")
    chosen = list(dict.fromkeys(what)) or [name for name, analysis in ANALYSES.items() if analysis.suits(runs)]
    files: list[Path] = []
    if to is not None:
        with writing_into(to):
            pass  # a place that cannot be used is refused before hours of work
    for name in chosen:
        for finding in ANALYSES[name].make(runs, options, say):
            mark = f"-{finding.run.name}" if to and finding.run and len(runs.paths) > 1 else ""
            files += write(name, finding, to or (finding.run or runs.paths[0]) / "analysis", mark)
    return files


def write(analysis: str, finding: Finding, folder: Path, mark: str = "") -> list[Path]:
    """Write the files of one finding; `mark` distinguishes those of several runs in one folder."""
    files: dict[Path, bytes] = {}
    for name, figure in finding.figures.items():
        files[folder / f"{name}{mark}.svg"] = to_bytes(figure, "svg")
        files[folder / f"{name}{mark}.png"] = to_bytes(figure, "png")
    if finding.table:
        files[folder / f"{finding.name}{mark}.md"] = finding.table.encode()
    facts = {
        "analysis": analysis,
        "title": finding.title,
        "caption": finding.caption,
        "figures": [f"{name}{mark}.svg" for name in finding.figures],
        **finding.numbers,
    }
    with writing_into(folder):
        for path, data in files.items():
            path.write_bytes(data)
        write_json(facts, folder / f"{finding.name}{mark}.json")
    return [*files, folder / f"{finding.name}{mark}.json"]


def _segments(runs: Runs) -> bool:
    return isinstance(runs.opened[0].study.task, Segmentation)


ANALYSES: dict[str, Analysis] = {
    "gallery": Analysis(gallery.analyse_gallery, lambda runs: True),
    "loss-surface": Analysis(loss_surface.analyse_loss_surface, lambda runs: True),
    "features": Analysis(features.analyse_features, lambda runs: any(run.selects for run in runs.opened)),
    "gamma": Analysis(gamma_sweep.analyse_gamma, lambda runs: any(run.thresholded for run in runs.opened)),
    "lambda": Analysis(lambda_sweep.analyse_lambda, lambda runs: lambda_sweep.is_lambda_sweep(runs.views)),
    "progress": Analysis(
        progress.analyse_progress, lambda runs: all(len(view.test_curve.rounds) > 1 for view in runs.views)
    ),
    "relationships": Analysis(
        relationships.analyse_relationships, lambda runs: any(map(has_relationships, runs.views))
    ),
    "overlays": Analysis(
        overlays.analyse_overlays, lambda runs: len(runs.opened[0].study.task.labels) > 2 and _segments(runs)
    ),
    "schedules": Analysis(schedules.analyse_schedules, lambda runs: any(view.method == "ufps" for view in runs.views)),
    "landscape": Analysis(landscape.analyse_landscape, lambda runs: False),
    "hessian": Analysis(hessian.analyse_hessian, lambda runs: False),
    "steepness": Analysis(steepness.analyse_steepness, lambda runs: False),
    "similarity": Analysis(similarity.analyse_similarity, lambda runs: False),
    "labels": Analysis(label_curves.analyse_labels, lambda runs: all(map(label_curves.has_label_curves, runs.views))),
    "ablation": Analysis(ablation.analyse_ablation, lambda runs: len(groups(runs.views)) > 1),
    "pseudo-labels": Analysis(pseudo_labels.analyse_pseudo_labels, lambda runs: False),
    "agreement": Analysis(agreement.analyse_agreement, lambda runs: False),
}
