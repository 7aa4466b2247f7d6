"""Commands that use a trained run: predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.train import Json
from consilium.errors import DataError


def predict(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder, or a package made by `consilium export`; with --hospital the first image.",
            metavar="RUN",
        ),
    ],
    images: Annotated[
        list[Path] | None, typer.Argument(help="Image files, or folders of them.", metavar="IMAGE")
    ] = None,
    to: Annotated[Path, typer.Option(help="Where masks and predictions.csv go.", metavar="DIR")] = Path("predictions"),
    site: Annotated[str | None, typer.Option(help="Use this hospital's own model for every image.")] = None,
    hospital: Annotated[
        Path | None,
        typer.Option(help="A hospital.toml: use what a federation delivered there.", metavar="FILE.toml"),
    ] = None,
    delivered: Annotated[
        str | None, typer.Option("--run", help="With --hospital: the run, by default the latest.", metavar="NAME")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a mask (or class) per image in the image's own geometry, and predictions.csv: model used, why.

    Example: consilium predict runs/fedsm-s0-1a2b3c4d scans/ --to masks
    """
    from consilium import prediction as predicting

    if hospital is not None:
        from consilium.hospital import read_hospital

        study, predictor = predicting.open_at_hospital(read_hospital(hospital), delivered)
        own = predictor.of_site(site) if site else predictor
        predictions = predicting.predict_with(study, own, [run, *(images or [])], to, site)
    elif not images:
        raise DataError(
            "name at least one image, or a folder of images, after the run; see `consilium predict --help`."
        )
    else:
        predictions = predicting.predict(run, images, to, site)
    if as_json:
        typer.echo(json.dumps({"predictions": [prediction.to_json() for prediction in predictions]}))
        return
    for prediction in predictions:
        typer.echo(f"{prediction.image}: {prediction.result}  ({prediction.model}; {prediction.why})", err=True)
        if prediction.warning:
            typer.echo(f"  warning: {prediction.warning}", err=True)
    typer.echo(str(to / "predictions.csv"))


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Use")(predict)
