"""The command that looks inside a run: analyse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from consilium.cli import completing
from consilium.cli.train import Quiet

NAMES = (
    "gallery, loss-surface, features, gamma, lambda, progress, relationships, overlays, schedules, landscape, hessian, "
    "steepness, similarity, labels, ablation, pseudo-labels, agreement"
)


def analyse(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN", autocompletion=completing.runs)],
    what: Annotated[
        str,
        typer.Option(
            help=f"One or more of {NAMES}, separated by commas; by default all fast ones that suit the runs.",
            metavar="NAMES",
        ),
    ] = "",
    site: Annotated[
        str | None,
        typer.Option(help="The site whose cases or relationships are used; by default the first, or all."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="The folder for the files; by default `analysis` in the run folder.", metavar="DIR"),
    ] = None,
    radius: Annotated[
        float | None, typer.Option(help="Loss surface: its extent; by default half the length of the first model.")
    ] = None,
    points: Annotated[int, typer.Option(help="Loss surface: points per axis, an odd number.")] = 21,
    directions: Annotated[int, typer.Option(help="Loss surface: number of random directions.")] = 10,
    filterwise: Annotated[
        bool, typer.Option("--filterwise", help="Scale each direction to the model's length, filter by filter.")
    ] = False,
    layout: Annotated[str, typer.Option(help="Features: tsne, or pca, which is faster.")] = "tsne",
    seed: Annotated[int, typer.Option(min=0, help="The seed of the directions and the layout.")] = 0,
    cases: Annotated[
        int,
        typer.Option(min=1, help="landscape, hessian, steepness, similarity: training cases per site, approximately."),
    ] = 16,
    quiet: Quiet = False,
) -> None:
    """Analyse runs: images, loss surfaces, curvature, selector features, sweeps, progress, relationships, similarity.

    Example: consilium analyse runs/fedsm-s0-1a2b3c4d runs/fedavg-s0-5e6f7a8b --what loss-surface --site rimone
    """
    from consilium.analysis.analyse import analyse
    from consilium.analysis.finding import Options

    options = Options(site, radius, points, directions, seed, filterwise, layout, cases)
    names = [name.strip() for name in what.split(",") if name.strip()]

    def say(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    for path in analyse(runs, names, to, options, say=say):
        typer.echo(str(path))


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Look")(analyse)
