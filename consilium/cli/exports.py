"""The command that hands a run to other software: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.", metavar="RUN")],
    to: Annotated[Path, typer.Option(help="A new or empty folder.", metavar="DIR")] = Path("export"),
) -> None:
    """Write a MONAI bundle per model, a package that predicts without the run folder, and a model card.

    Example: consilium export runs/fedsm-s0-1a2b3c4d --to retina-model
    """
    from consilium.export.exporting import export_run

    done = export_run(run, to)
    typer.echo(f"bundles: {', '.join(done.models) or 'none, the models are not whole networks'}", err=True)
    worst = max(done.gaps.values())
    typer.echo(f"checked in a fresh process: outputs differ by at most {worst:.1e}", err=True)
    if not done.onnx:
        typer.echo("no ONNX files: they need the packages onnx and onnxscript", err=True)
    typer.echo(str(done.folder))


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Use")(export)
