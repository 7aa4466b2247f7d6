"""The command that hands a run to other software: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from consilium.cli import completing
from consilium.errors import DataError


def export(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="The folder of a finished run; leave it out with --hospital.",
            metavar="RUN",
            autocompletion=completing.runs,
        ),
    ] = None,
    to: Annotated[Path, typer.Option(help="A new or empty folder.", metavar="DIR")] = Path("export"),
    hospital: Annotated[
        Path | None,
        typer.Option(
            help="A hospital.toml: export the release that a federation delivered there.", metavar="FILE.toml"
        ),
    ] = None,
    delivered: Annotated[
        str | None, typer.Option("--run", help="With --hospital: the run, by default the latest.", metavar="NAME")
    ] = None,
) -> None:
    """Write a MONAI bundle per model, a package that predicts without the run folder, and a model card.

    Example: consilium export runs/fedsm-s0-1a2b3c4d --to retina-model
    """
    from consilium.export.exporting import export_delivered, export_run

    if hospital is not None:
        from consilium.hospital import read_hospital
        from consilium.prediction import open_at_hospital

        done = export_delivered(*open_at_hospital(read_hospital(hospital), delivered), to)
    elif run is None:
        raise DataError("name a run folder, or a hospital.toml with --hospital; see `consilium export --help`.")
    else:
        done = export_run(run, to)
    typer.echo(f"bundles: {', '.join(done.models) or 'none, because no model is a complete network'}", err=True)
    worst = max(done.gaps.values())
    typer.echo(f"checked in a fresh process: outputs differ by at most {worst:.1e}", err=True)
    if not done.onnx:
        typer.echo("no ONNX files: they need the packages onnx and onnxscript", err=True)
    typer.echo(str(done.folder))


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Use")(export)
