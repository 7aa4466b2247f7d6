"""The command that looks inside a run: analyse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NAMES = (
    "gallery, loss-surface, features, gamma, lambda, progress, relationships, overlays, schedules, landscape, hessian, "
    "steepness, similarity, labels, ablation, pseudo-labels, agreement"
)


def analyse(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN")],
    what: Annotated[
        str,
        typer.Option(
            help=f"Of {NAMES}, separated by commas; by default all that suit the runs and do not take long.",
            metavar="NAMES",
        ),
    ] = "",
    site: Annotated[
        str | None,
        typer.Option(help="Whose cases models are tried on, whose relationships are shown; else the first, or all."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Where the files go; else `analysis` in the run folder.", metavar="DIR")
    ] = None,
    radius: Annotated[
        float | None, typer.Option(help="Of the loss surface: how far to go; else half the length of the first model.")
    ] = None,
    points: Annotated[int, typer.Option(help="Of the loss surface: steps from one end to the other, odd.")] = 21,
    directions: Annotated[int, typer.Option(help="Of the loss surface: how many random ones.")] = 10,
    filterwise: Annotated[
        bool, typer.Option("--filterwise", help="Directions as long as the model, filter by filter.")
    ] = False,
    layout: Annotated[str, typer.Option(help="Of the features: tsne, or pca, which is fast.")] = "tsne",
    seed: Annotated[int, typer.Option(min=0, help="Of the directions and the layout.")] = 0,
    cases: Annotated[
        int, typer.Option(min=1, help="Of landscape, hessian, steepness, similarity: training cases of a site, about.")
    ] = 16,
) -> None:
    """Look inside runs: images, loss surfaces and curvature, selector features, sweeps, progress, APPLE's p, likeness.

    Example: consilium analyse runs/fedsm-s0-1a2b3c4d runs/fedavg-s0-5e6f7a8b --what loss-surface --site rimone
    """
    from consilium.analysis.analyse import analyse
    from consilium.analysis.finding import Options

    options = Options(site, radius, points, directions, seed, filterwise, layout, cases)
    names = [name.strip() for name in what.split(",") if name.strip()]
    for path in analyse(runs, names, to, options, say=lambda text: typer.echo(text, err=True)):
        typer.echo(str(path))


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Look")(analyse)
