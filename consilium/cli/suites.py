"""The command that runs suites."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from consilium.cli import completing
from consilium.cli.train import Json, Quiet, Workers
from consilium.errors import WorkError
from consilium.wording import counted

if TYPE_CHECKING:
    from consilium.cli.progress import ProgressDisplay
    from consilium.suites.running import SuiteResult, SuiteRun

WIDE = 220  # columns where there is no terminal: a folded number is hard to read in a file


def suite(
    file: Annotated[Path, typer.Argument(help="The suite, a TOML file (see studies/).", metavar="SUITE.toml")],
    runs: Annotated[Path, typer.Option(help="The folder for run folders.")] = Path("runs"),
    workers: Workers = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only this method's rows; may be repeated.", metavar="METHOD", autocompletion=completing.methods
        ),
    ] = None,
    seeds: Annotated[
        list[int] | None,
        typer.Option("--seed", help="Seeds in place of the suite's own; may be repeated.", metavar="N"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and their state; train nothing.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a grid (methods × settings × seeds), skip finished runs, and print a table next to the paper's.

    Example: consilium suite studies/fedsm_table3_quick.toml
    """
    from consilium.cli.progress import ProgressDisplay, kept
    from consilium.suites.running import outlook, run_suite

    if dry_run:
        _list(outlook(file, runs, only or (), seeds or ()), as_json)
        return
    with kept("the same command"), ProgressDisplay(quiet=as_json or quiet) as progress:
        result = run_suite(file, runs, workers, _SuiteOutput(progress), only or (), seeds or (), not (as_json or quiet))
    if as_json:
        typer.echo(json.dumps(result.to_json(), allow_nan=False))
    else:
        _show(result)
    if result.failed:
        many = "One run" if len(result.failed) == 1 else f"{len(result.failed)} runs"
        whys = "\n".join(f"  {failure.title} ({failure.run}): {failure.why}" for failure in result.failed)
        raise WorkError(f"{many} of the suite failed; the same command tries again:\n{whys}")


class _SuiteOutput:
    """Words of a suite are words: "[local] lr" is not markup."""

    def __init__(self, progress: ProgressDisplay) -> None:
        self._progress = progress

    def say(self, text: str) -> None:
        self._progress.say(text)

    def show(self, event: Mapping[str, Any]) -> None:
        self._progress.show(event)


def _list(prospects: Sequence[SuiteRun], as_json: bool) -> None:
    if as_json:
        listed = [{"title": p.title, "run": str(p.folder) if p.folder else None, "state": p.state} for p in prospects]
        typer.echo(json.dumps({"runs": listed}))
        return
    for number, prospect in enumerate(prospects, start=1):
        where = f"  {prospect.folder}" if prospect.folder else ""
        typer.echo(f"{number:3d}  {prospect.state:14s}  {prospect.title}{where}")
    left = sum(prospect.state != "done" for prospect in prospects)
    typer.echo(f"{counted(len(prospects), 'run')}, {left} to do", err=True)


def _show(result: SuiteResult) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    for part in [part for table in result.shown for part in table.to_rich()]:
        console.print(part)
    typer.echo(f"{result.folder / 'table.md'}")


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Train")(suite)
