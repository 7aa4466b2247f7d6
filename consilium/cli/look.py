"""Commands that show something: methods, contract, studies, compare, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli import completing
from consilium.cli.train import Json

Runs = Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN", autocompletion=completing.runs)]


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A method; its fields and what leaves the hospital are printed.", autocompletion=completing.methods
        ),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(help="Print what leaves each hospital in this study, with sizes.", metavar="STUDY.toml"),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods, or describe one: its paper, its fields, what leaves the hospital and what stays."""
    from consilium.describe import describe, describe_all, find, leaving, leaving_text

    if study is not None:
        from consilium.study_reading import load_study

        told = load_study(study, [f"method.name={name}"] if name else [])
        typer.echo(json.dumps(leaving(told)) if as_json else leaving_text(told))
        return
    if as_json:
        chosen = [find(name)] if name else None
        typer.echo(json.dumps({"methods": describe_all(chosen)}))
    else:
        typer.echo(describe(name))


def studies(
    name: Annotated[
        str | None,
        typer.Argument(help="The study to copy; without it, all are listed.", autocompletion=completing.studies),
    ] = None,
    to: Annotated[Path, typer.Option(help="The folder to copy into.", metavar="DIR")] = Path("studies"),
) -> None:
    """List the studies and suites of the package, or copy one with the files it needs.

    Example: consilium studies retina_fedsm --to studies
    """
    from consilium.ready_studies import copy_study, ready_studies

    if name is not None:
        for path in copy_study(name, to):
            typer.echo(str(path))
        return
    found = ready_studies()
    width = max(map(len, found))
    for study, about in found.items():
        typer.echo(f"{study.ljust(width)}  {about}".rstrip())


def contract(
    name: Annotated[
        str,
        typer.Argument(
            help="A method: fedavg, or your own as file.py:Name.", metavar="METHOD", autocompletion=completing.methods
        ),
    ],
) -> None:
    """Run the contract tests on a method: it learns, resumes to the same bits, survives lost replies, and more.

    Exit status 1 if a test fails. Example: consilium contract mine.py:FocalAvg
    """
    from consilium.contract import check_contract
    from consilium.describe import find
    from consilium.errors import WorkError

    broken = check_contract(find(name), typer.echo)
    if broken:
        raise WorkError(f"{name} fails {broken} of the tests above.")


def compare(
    runs: Runs,
    labels: Annotated[
        bool, typer.Option("--labels", help="Add a table per site with the scores of each label.")
    ] = False,
    metric: Annotated[
        str | None, typer.Option(help="Another score than the headline, such as hd95 or auc.", metavar="SCORE")
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", help="Print the tables as md, latex or csv.", metavar="FORMAT")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print one table of runs: each site, site mean, pooled cases, 95 % intervals and paired differences.

    Example: consilium compare runs/* --labels
    """
    from consilium.reports.comparing import compare as compare_runs
    from consilium.reports.costs import CostTable, cost_of
    from consilium.reports.labels import site_tables
    from consilium.reports.reading import read_run, run_folders
    from consilium.reports.table_formats import about_metric, as_text, difference_grid
    from consilium.reports.tables import rich_table, show

    views = [read_run(run) for run in run_folders(runs)]
    comparison = compare_runs([about_metric(view, metric) for view in views] if metric else views)
    if form is not None:
        typer.echo(as_text(comparison, form), nl=False)
        return
    tables = site_tables(comparison) if labels else {}
    costs = CostTable(tuple(cost_of(group.name, group.runs) for group in comparison.groups))
    if as_json:
        by_label = {"labels": {site: table.to_json() for site, table in tables.items()}} if labels else {}
        found = {**comparison.to_json(), **by_label, "costs": costs.to_json()}
        typer.echo(json.dumps(found, allow_nan=False))
    else:
        gaps = difference_grid(comparison)
        paired = [rich_table("Paired differences on the same test cases", gaps)] if gaps else []
        by_site = [rich_table(table.title, table.grid()) for table in tables.values()]
        show(comparison, paired + by_site + costs.to_rich())


def report(
    runs: Runs,
    to: Annotated[Path, typer.Option(help="The page to write.", metavar="FILE.html")] = Path("report.html"),
) -> None:
    """Write one self-contained page: tables, curves, overlays, the selector's choices, cost."""
    from consilium.reporting import write_report

    write_report(runs, to)
    typer.echo(str(to))


def add_to(app: typer.Typer) -> None:
    for command in (compare, report, methods, contract, studies):
        app.command(rich_help_panel="Look")(command)
