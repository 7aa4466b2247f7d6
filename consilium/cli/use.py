"""Commands that use a trained run: predict, evaluate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilium.cli import completing
from consilium.cli.train import Json
from consilium.errors import DataError, StudyError

if TYPE_CHECKING:
    from consilium.prediction import Prediction, PredictOptions

Mirror = Annotated[bool, typer.Option("--mirrored", help="Average over mirror images: slower, often a little better.")]


def predict(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder, or a package made by `consilium export`; with --hospital the first image.",
            metavar="RUN",
            autocompletion=completing.runs,
        ),
    ],
    images: Annotated[
        list[Path] | None, typer.Argument(help="Image files, or folders of them.", metavar="IMAGE")
    ] = None,
    to: Annotated[Path, typer.Option(help="The folder for masks and predictions.csv.", metavar="DIR")] = Path(
        "predictions"
    ),
    site: Annotated[str | None, typer.Option(help="Use this site's own model for every image.")] = None,
    hospital: Annotated[
        Path | None,
        typer.Option(help="A hospital.toml: use the release that a federation delivered there.", metavar="FILE.toml"),
    ] = None,
    delivered: Annotated[
        str | None, typer.Option("--run", help="With --hospital: the run, by default the latest.", metavar="NAME")
    ] = None,
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            help="Say a class from this probability on, e.g. melanoma=0.3; may be repeated.", metavar="CLASS=P"
        ),
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also write a map of every label's probability.")
    ] = False,
    overlays: Annotated[
        bool, typer.Option("--overlays", help="Also write a picture of every image with the mask's outlines.")
    ] = False,
    mirrored: Mirror = False,
    as_json: Json = False,
) -> None:
    """Write a mask (or class) per image in the image's geometry, and predictions.csv: model used and reason.

    Example: consilium predict runs/fedsm-s0-1a2b3c4d scans/ --to masks
    """
    from consilium import prediction as predicting

    options = predicting.PredictOptions(_thresholds(threshold or []), probabilities, overlays, mirrored)
    if hospital is None and not images:
        raise DataError(
            "name at least one image, or a folder of images, after the run; see `consilium predict --help`."
        )
    faulty: predicting.UnusableImages | None = None
    try:
        predictions = _predicted(run, images or [], to, site, hospital, delivered, options)
    except predicting.UnusableImages as error:
        if not error.done and not as_json:
            raise
        faulty, predictions = error, error.done
    if as_json:
        done = [prediction.to_json() for prediction in predictions]
        typer.echo(json.dumps({"predictions": done, "errors": list(faulty.faults) if faulty else []}))
    else:
        _show(predictions)
        typer.echo(str(to / "predictions.csv"))
    if faulty:
        raise faulty


def _predicted(
    run: Path,
    images: list[Path],
    to: Path,
    site: str | None,
    hospital: Path | None,
    delivered: str | None,
    options: PredictOptions,
) -> Sequence[Prediction]:
    from consilium import prediction as predicting

    if hospital is not None:
        from consilium.hospital import read_hospital

        settings = read_hospital(hospital)
        study, predictor = predicting.open_at_hospital(settings, delivered)
        own = predictor.of_site(site) if site else predictor
        trained = predicting.trained_on_at_hospital(settings, delivered)
        return predicting.predict_with(study, own, [run, *images], to, site, trained, options)
    return predicting.predict(run, images, to, site, options)


def _show(predictions: Sequence[Prediction]) -> None:
    for prediction in predictions:
        sure = f" {prediction.probabilities[prediction.result]:.3f}" if prediction.probabilities else ""
        typer.echo(f"{prediction.image}: {prediction.result}{sure}  ({prediction.model}; {prediction.why})", err=True)
        if prediction.warning:
            typer.echo(f"  warning: {prediction.warning}", err=True)


def _thresholds(texts: list[str]) -> dict[str, float]:
    found = {}
    for text in texts:
        label, equals, number = text.rpartition("=")
        try:
            found[label] = float(number)
        except ValueError:
            equals = ""
        if not equals:
            raise StudyError(f"--threshold {text}: write it as CLASS=PROBABILITY, for instance melanoma=0.3.")
    return found


def evaluate(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder, or a package made by `consilium export`.", metavar="RUN", autocompletion=completing.runs
        ),
    ],
    federation: Annotated[
        Path, typer.Argument(help="Labelled cases: a federation's folder with the model's labels.", metavar="DIR")
    ],
    split: Annotated[str, typer.Option(help="Which cases: test, valid, train or all.")] = "test",
    site: Annotated[str | None, typer.Option(help="Use this hospital's own model for every case.")] = None,
    mirrored: Mirror = False,
    page: Annotated[
        Path | None, typer.Option(help="Write a page with tables and figures.", metavar="FILE.html")
    ] = None,
    as_json: Json = False,
) -> None:
    """Score a finished model on labelled cases, also new ones: site by site, with 95 % intervals.

    Example: consilium evaluate runs/fedsm-s0-1a2b3c4d data/new --page scores.html
    """
    from consilium.evaluation import evaluate_on
    from consilium.finished_run import open_run
    from consilium.reports.evaluation_page import show_evaluation, write_evaluation_page
    from consilium.reports.rendering import check_page_place

    if page is not None:
        check_page_place(page, DataError)
    opened = open_run(run)
    predictor = opened.predictor(site)
    if mirrored:
        from consilium.test_time import Mirrored

        predictor = Mirrored(opened.study.task.on("cpu"), predictor)
    found = evaluate_on(opened.study, predictor, federation, split, opened.path)
    if found.warning:
        typer.echo(f"note: {found.warning}", err=True)
    if as_json:
        typer.echo(json.dumps({"run": str(run), **found.to_json()}, allow_nan=False))
    else:
        show_evaluation(found)
    if page is not None:
        write_evaluation_page(found, run.resolve().name, page)
        typer.echo(str(page), err=as_json)


def add_to(app: typer.Typer) -> None:
    for command in (predict, evaluate):
        app.command(rich_help_panel="Use")(command)
