"""Commands that train: run, resume, demo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from consilium.errors import RunError

Workers = Annotated[
    int | None,
    typer.Option(min=0, help="Processes the sites share; by default one per core. 0: everything in this process."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output and nothing else there.")
]


def run(
    study: Annotated[Path, typer.Argument(help="The study, a TOML file (see studies/).", metavar="STUDY.toml")],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Change a key of the study, e.g. --set local.lr=0.01; may be repeated.", metavar="KEY=VALUE"
        ),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    workers: Workers = None,
    attendance: Annotated[
        Path | None,
        typer.Option(help="A run folder: sites are away exactly where that run's sites were.", metavar="RUN"),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Train in a new run folder, though there is a run of this study.")
    ] = False,
    policy: Annotated[
        list[Path] | None,
        typer.Option(
            help="A hospital.toml whose rules the site it names goes by, as it would in a federation; may be repeated.",
            metavar="HOSPITAL.toml",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a study and print its run folder.

    Example: consilium run studies/retina_fedsm.toml --set study.rounds=40
    """
    from consilium import simulation
    from consilium.cli.progress import Progress, kept
    from consilium.machine import pick_device
    from consilium.rehearsal import put_rules, read_rules, runs_under
    from consilium.run_folder import RunFolder
    from consilium.study import load_study

    loaded = load_study(study, changes or [])
    if attendance is not None:
        loaded = simulation.with_attendance(loaded, attendance)
    pick_device(loaded.local.device, 0)  # refuse a device that is not there before anything is written
    rules = read_rules(policy or [], loaded)
    path = simulation.choose_place(loaded, runs_under(rules, runs), again)
    with kept(f"`consilium resume {path}`"):
        with Progress(quiet=as_json) as progress:
            folder = RunFolder.create_at(path, loaded, progress.of(path))
            if folder.finished:
                progress.say(f"this study is finished: {path}")
            elif folder.begun:
                raise RunError(
                    f"this study was begun and not finished; go on with `consilium resume {path}`, or train anew with "
                    "--again."
                )
            put_rules(rules, folder.path)
            result = simulation.go_on(folder, workers)
        _print(result, as_json)


def resume(
    run: Annotated[Path, typer.Argument(help="The folder of an interrupted run.", metavar="RUN")],
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Go on with a run after a crash; the result is bit for bit that of an uninterrupted one."""
    from consilium import simulation
    from consilium.cli.progress import Progress, kept
    from consilium.run_folder import RunFolder

    with kept(f"`consilium resume {run}`"):
        with Progress(quiet=as_json) as progress:
            folder = RunFolder.open(run, progress.of(run))
            if folder.finished:
                progress.say(f"this run is finished: {folder.path}")
            result = simulation.go_on(folder, workers)
        _print(result, as_json)


def demo(
    to: Annotated[Path, typer.Option(help="Where data, runs, predictions and report.html go.")] = Path("demo"),
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each method; by default 100.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the data and the training.")] = 0,
    workers: Workers = None,
) -> None:
    """Train six synthetic hospitals: pooled, local, FedAvg and FedSM, with a table, a report and predictions."""
    from consilium.cli.progress import Progress, kept
    from consilium.demo import DEFAULT_ROUNDS, run_demo

    with kept("the same command"), Progress() as progress:
        outcome = run_demo(to, rounds or DEFAULT_ROUNDS, seed, workers, progress)
    outcome.show()


def _print(result: Any, as_json: bool) -> None:
    from consilium import reporting
    from consilium.run_folder import disk_errors

    if as_json:
        typer.echo(json.dumps({"run": str(result.folder), **result.summary}))
        return
    if not (result.folder / "report.html").exists():
        with disk_errors(result.folder):
            reporting.write_report([result.folder], result.folder / "report.html")
    head = result.summary["headline"]
    if "site_mean" in head:
        typer.echo(
            f"{result.summary['method']}: {head['metric']} of the {head['model']} model on test cases, "
            f"site mean {head['site_mean']:.4f} (best round on validation: {result.summary['best']['round']})",
            err=True,
        )
    if missing := [*result.summary.get("unscored", ()), *result.summary.get("undelivered", ())]:
        typer.echo(
            f"note: the run ended without {', '.join(sorted(set(missing)))}: their last scores or their release are "
            "missing, and means are over the others; `consilium federation resume JOB` asks them again.",
            err=True,
        )
    typer.echo(str(result.folder))


def add_to(app: typer.Typer) -> None:
    for command in (demo, run, resume):
        app.command(rich_help_panel="Train")(command)
