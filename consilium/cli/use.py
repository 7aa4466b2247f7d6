"""Commands that use a trained run: predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.train import Json


def predict(
    run: Annotated[Path, typer.Argument(help="A run folder, or a package made by `consilium export`.", metavar="RUN")],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.", metavar="IMAGE")],
    to: Annotated[Path, typer.Option(help="Where masks and predictions.csv go.", metavar="DIR")] = Path("predictions"),
    site: Annotated[str | None, typer.Option(help="Use this hospital's own model for every image.")] = None,
    as_json: Json = False,
) -> None:
    """Write a mask (or class) per image in the image's own geometry, and predictions.csv: model used, why.

    Example: consilium predict runs/fedsm-s0-1a2b3c4d scans/ --to masks
    """
    from consilium.prediction import predict as predict_images

    predictions = predict_images(run, images, to, site)
    if as_json:
        typer.echo(json.dumps({"predictions": [prediction.to_json() for prediction in predictions]}))
        return
    for prediction in predictions:
        typer.echo(f"{prediction.image}: {prediction.result}  ({prediction.model}; {prediction.why})", err=True)
    typer.echo(str(to / "predictions.csv"))


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Use")(predict)
