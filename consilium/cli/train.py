"""Commands that train: demo, init, run, resume."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from consilium.cli import completing
from consilium.errors import RunError, StudyError, TableFaults
from consilium.wording import command

if TYPE_CHECKING:
    from consilium.cli.progress import ProgressDisplay
    from consilium.study import Study

Workers = Annotated[
    int | None,
    typer.Option(min=0, help="Number of worker processes; by default one per core. 0: everything in this process."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress: print only the result and mistakes.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, on standard output.")]


def run(
    study: Annotated[Path, typer.Argument(help="The study, a TOML file (see studies/).", metavar="STUDY.toml")],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Change a key of the study, e.g. --set local.lr=0.01; may be repeated.", metavar="KEY=VALUE"
        ),
    ] = None,
    runs: Annotated[Path, typer.Option(help="The folder for run folders.")] = Path("runs"),
    workers: Workers = None,
    attendance: Annotated[
        Path | None,
        typer.Option(
            help="A run folder: sites are away in the same rounds as in that run.",
            metavar="RUN",
            autocompletion=completing.runs,
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Train in a new run folder although a run of this study exists.")
    ] = False,
    policy: Annotated[
        list[Path] | None,
        typer.Option(
            help="A hospital.toml: its site follows these rules, as in a real federation; may be repeated.",
            metavar="HOSPITAL.toml",
        ),
    ] = None,
    page: Annotated[
        bool, typer.Option("--watch", help="Serve a page about the run on this machine while it trains.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="The device of this run: auto, cpu, cuda, cuda:1, mps.", metavar="DEVICE")
    ] = None,
    dry: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would run and what it would take; train nothing, write no run."),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a study and print its run folder.

    Example: consilium run studies/retina_fedsm.toml --set study.rounds=40
    """
    silent = as_json or quiet
    _begin(workers, study, silent)
    from consilium import simulation
    from consilium.cli.progress import ProgressDisplay, kept
    from consilium.machine import check_compiler, pick_device
    from consilium.rehearsal import objections, put_rules, read_rules, runs_under
    from consilium.run_files.lock import way_on
    from consilium.run_folder import RunFolder

    loaded = _loaded(study, [*(changes or []), *([f"local.device={device}"] if device else [])])
    if attendance is not None:
        loaded = simulation.with_attendance(loaded, attendance)
    rules = read_rules(policy or [], loaded)
    notes = [found.note for found in rules.values() if found.note]
    if dry:
        said = objections(rules, loaded)
        _dry_run(loaded, runs_under(rules, runs), workers, as_json, [*notes, *said.notes], said.refused)
        return
    device_here = pick_device(loaded.local.device, 0)  # refuse what is not there before anything is written
    if loaded.local.compile:
        check_compiler(device_here)
    path = simulation.choose_place(loaded, runs_under(rules, runs), again)
    with kept(command("resume", path)):
        with ProgressDisplay(quiet=silent) as progress:
            for note in notes:
                progress.say(f"note: {note}")
            folder = RunFolder.create_at(path, loaded, progress.of(path))
            if folder.finished:
                progress.say(f"this study is already finished: {path}")
            elif folder.begun:
                raise RunError(
                    f"this study was started and not finished; {way_on(path)}, or train it again with --again."
                )
            put_rules(rules, folder.path, folder.study)
            with _page(folder.path, progress, silent) if page else nullcontext():
                result = simulation.go_on(folder, workers)
        _print(result, as_json, quiet)


def _loaded(study: Path, changes: Sequence[str]) -> Study:
    from consilium.study_reading import load_study

    try:
        return load_study(study, changes)
    except TableFaults as error:
        from consilium.data.check import check
        from consilium.data.site_folder import refuse

        refuse(check(error.folder).faults, str(error.folder))  # those of images too, none hidden behind the first
        raise


@contextmanager
def _page(run: Path, progress: ProgressDisplay, silent: bool) -> Iterator[None]:
    """Serve the page about a run, and say where."""
    from consilium.cli.watch import beside

    with beside(run) as url:
        address = f"  page: {url}"
        if silent:  # it was asked for, and nothing else tells the port
            typer.echo(address, err=True)
        else:
            progress.say(address)
        yield


def _dry_run(study: Study, runs: Path, workers: int | None, as_json: bool, notes: Sequence[str], refused: str) -> None:
    from consilium.dry_run import dry_run
    from consilium.inputs import place_of

    found = dry_run(study, place_of(study, runs).path, workers)
    found = replace(found, notes=(*found.notes, *notes), refused=found.refused or refused)
    if as_json:
        typer.echo(json.dumps(found.to_json(), allow_nan=False))
    else:
        for line in found.lines():
            typer.echo(line)
    if found.refused:
        raise StudyError(found.refused)


def resume(
    run: Annotated[
        Path, typer.Argument(help="The folder of an interrupted run.", metavar="RUN", autocompletion=completing.runs)
    ],
    workers: Workers = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue an interrupted run; the result equals that of an uninterrupted run, bit for bit."""
    _begin(workers, run / "study.toml", as_json or quiet)
    from consilium import simulation
    from consilium.cli.progress import ProgressDisplay, kept
    from consilium.run_folder import RunFolder

    with kept(command("resume", run)):
        with ProgressDisplay(quiet=as_json or quiet) as progress:
            folder = RunFolder.open(run, progress.of(run))
            if folder.finished:
                progress.say(f"this run is already finished: {folder.path}")
            result = simulation.go_on(folder, workers)
        _print(result, as_json, quiet)


def demo(
    to: Annotated[Path, typer.Option(help="The folder for data, runs, predictions and report.html.")] = Path("demo"),
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each method; by default 100.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the data and the training.")] = 0,
    workers: Workers = None,
    quiet: Quiet = False,
) -> None:
    """Train pooled, local, FedAvg and FedSM on six synthetic hospitals, with a table, a report and predictions."""
    from consilium.cli.progress import ProgressDisplay, kept
    from consilium.demo import DEFAULT_ROUNDS, run_demo

    with kept("the same command"), ProgressDisplay(quiet=quiet) as progress:
        outcome = run_demo(to, rounds or DEFAULT_ROUNDS, seed, workers, progress)
    outcome.show()


def init(
    federation: Annotated[
        Path | None, typer.Option(help="The federation's folder; asked for on a terminal.", metavar="DIR")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="The method; by default one that suits the federation.",
            metavar="NAME",
            autocompletion=completing.methods,
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of training; by default 100.")] = None,
    to: Annotated[
        Path | None, typer.Option(help="The file to write; by default study.toml.", metavar="STUDY.toml")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing; take the default for what is not given.")] = False,
) -> None:
    """Write a first study for a federation, with a comment on every line.

    Example: consilium init --federation data/small --method fedsm --rounds 60 --to small.toml --yes
    """
    from consilium.data.site_folder import read_federation
    from consilium.first_study import ROUNDS, suggest_method, write_first_study

    ask = not yes and sys.stdin.isatty()
    if federation is None:
        if not ask:
            raise StudyError("--federation is missing; name the folder that holds federation.toml.")
        federation = Path(typer.prompt("Folder of the federation", err=True))
    method = method or suggest_method(read_federation(federation))
    if ask:
        method = typer.prompt("Method (`consilium methods` lists them)", default=method, err=True)
        rounds = rounds or typer.prompt("Rounds", default=ROUNDS, type=int, err=True)
        to = to or Path(typer.prompt("File to write", default="study.toml", err=True))
    written = write_first_study(federation, to or Path("study.toml"), method, ROUNDS if rounds is None else rounds)
    typer.echo(f"method {method}; train with {command('run', written)}", err=True)
    typer.echo(str(written))


def _begin(workers: int | None, study: Path, quiet: bool) -> None:
    """Say that something happens, and let worker processes import what they need while this one does."""
    from consilium.wires.stem import prepare

    if not study.is_file():
        return
    if not quiet and sys.stderr.isatty():
        typer.echo(f"reading {study}", err=True)
    if workers != 0:
        prepare()


def _print(result: Any, as_json: bool, quiet: bool = False) -> None:
    from consilium import reporting
    from consilium.run_folder import disk_errors

    if as_json:
        typer.echo(json.dumps({"run": str(result.folder), **result.summary}))
        return
    if not (result.folder / "report.html").exists():
        with disk_errors(result.folder):
            reporting.write_report([result.folder], result.folder / "report.html")
    head = result.summary["headline"]
    if "site_mean" in head and not quiet:
        typer.echo(
            f"{result.summary['method']}: {head['metric']} of the {head['model']} model on test cases, "
            f"site mean {head['site_mean']:.4f} (best round on validation: {result.summary['best']['round']})",
            err=True,
        )
    if missing := [*result.summary.get("unscored", ()), *result.summary.get("undelivered", ())]:
        typer.echo(
            f"note: the run ended without {', '.join(sorted(set(missing)))}: their last scores or their release are "
            "missing, and means cover the other sites; `consilium federation resume JOB` asks them again.",
            err=True,
        )
    typer.echo(str(result.folder))


def add_to(app: typer.Typer) -> None:
    for each in (demo, init, run, resume):
        app.command(rich_help_panel="Train")(each)
