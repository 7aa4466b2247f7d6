"""Commands that look: methods, compare, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.train import Json

Runs = Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN")]


def methods(
    name: Annotated[str | None, typer.Argument(help="A method, for its fields and what leaves the hospital.")] = None,
    study: Annotated[
        Path | None, typer.Option(help="What leaves each hospital in this study, with sizes.", metavar="STUDY.toml")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods; for one: its paper, its fields, what leaves the hospital and what stays."""
    from consilium.describe import describe, describe_all, find, leaving, leaving_text

    if study is not None:
        from consilium.study import load_study

        told = load_study(study, [f"method.name={name}"] if name else [])
        typer.echo(json.dumps(leaving(told)) if as_json else leaving_text(told))
        return
    if as_json:
        chosen = [find(name)] if name else None
        typer.echo(json.dumps({"methods": describe_all(chosen)}))
    else:
        typer.echo(describe(name))


def compare(
    runs: Runs,
    labels: Annotated[bool, typer.Option("--labels", help="Also every site's scores label by label.")] = False,
    as_json: Json = False,
) -> None:
    """One table over runs: site by site, site mean, pooled cases, with 95 % intervals.

    Example: consilium compare runs/* --labels
    """
    from consilium.reports.labels import site_tables
    from consilium.reports.reading import read_run
    from consilium.reports.tables import compare as compare_runs
    from consilium.reports.tables import rich_table, show

    comparison = compare_runs([read_run(run) for run in runs])
    tables = site_tables(comparison) if labels else {}
    if as_json:
        by_label = {"labels": {site: table.to_json() for site, table in tables.items()}} if labels else {}
        typer.echo(json.dumps({**comparison.to_json(), **by_label}, allow_nan=False))
    else:
        show(comparison, [rich_table(table.title, table.grid()) for table in tables.values()])


def report(
    runs: Runs,
    to: Annotated[Path, typer.Option(help="The page to write.", metavar="FILE.html")] = Path("report.html"),
) -> None:
    """Write one self-contained page: tables, curves, overlays, what the selector chose, cost."""
    from consilium.reporting import write_report

    write_report(runs, to)
    typer.echo(str(to))


def add_to(app: typer.Typer) -> None:
    for command in (compare, report, methods):
        app.command(rich_help_panel="Look")(command)
