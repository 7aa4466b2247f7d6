"""Commands of a real federation: init, kits, server, site, submit, status, log, stop, resume, fetch, forecast, try."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from consilium.errors import WorkError
from consilium.federation import require_flare

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="A real federation between machines, on NVIDIA FLARE (the extra 'federation').",
)

Kit = Annotated[Path, typer.Option("--kit", help="The office's kit.", metavar="DIR")]
Job = Annotated[str, typer.Argument(help="A job, as `submit` and `status` name it.", metavar="JOB")]
StudyFile = Annotated[Path, typer.Argument(help="The study, a TOML file.", metavar="STUDY.toml")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a key of the study; may be repeated.", metavar="KEY=VALUE"),
]
Runs = Annotated[Path, typer.Option(help="Where the run folder goes.", metavar="DIR")]
OFFICE = Path("kits/office")


@app.command()
def init(
    to: Annotated[Path, typer.Argument(help="The project file to write.", metavar="FILE.toml")],
    server: Annotated[str, typer.Option(help="The name or address under which all sites reach the server.")],
    site: Annotated[list[str], typer.Option(help="A site's name; repeat it for each.")],
    name: Annotated[str, typer.Option(help="The consortium's name.")] = "consortium",
    port: Annotated[int, typer.Option(help="The server's one port.")] = 8002,
) -> None:
    """Write the project file: who takes part, and where the server is."""
    from consilium.federation.project import Project

    Project(name, server, port, tuple(site)).write(to)
    typer.echo(str(to))


@app.command()
def kits(
    project: Annotated[Path, typer.Argument(help="The project file.", metavar="FILE.toml")],
    to: Annotated[Path, typer.Option(help="A new folder for the kits.", metavar="DIR")] = Path("kits"),
) -> None:
    """Make one start-up kit per participant, each with its own certificate."""
    from consilium.federation.project import read_project

    require_flare()
    from consilium.federation.kits import make_kits

    for kit in make_kits(read_project(project), to).values():
        typer.echo(str(kit))


@app.command()
def server(
    kit: Annotated[Path, typer.Argument(help="The server's kit.", metavar="KIT")],
    code: Annotated[
        list[str] | None,
        typer.Option(help="A class of another package that studies may name; may be repeated.", metavar="MODULE:CLASS"),
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="After a crash, go on by itself with the runs that died with the server.")
    ] = True,
) -> None:
    """Keep the server running until it is stopped (Ctrl-C or SIGTERM)."""
    _supervise(kit, "server", None, code or [], resume)


@app.command()
def site(
    kit: Annotated[Path, typer.Argument(help="This hospital's kit.", metavar="KIT")],
    hospital: Annotated[Path, typer.Option(help="This hospital's own settings.", metavar="FILE.toml")] = Path(
        "hospital.toml"
    ),
    example: Annotated[bool, typer.Option("--example", help="Write an example of the settings, and stop.")] = False,
) -> None:
    """Keep this hospital's site running until it is stopped (Ctrl-C or SIGTERM)."""
    from consilium.hospital import write_example

    if example:
        typer.echo(str(write_example(hospital, kit)))
        return
    _supervise(kit, "site", hospital)


@app.command()
def submit(
    study: StudyFile,
    changes: Changes = None,
    kit: Kit = OFFICE,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
) -> None:
    """Send a study to the server and print the job's name; the study holds no data and the job no code."""
    from consilium.study import load_study

    loaded = load_study(study, changes or [])
    with _office(kit) as office:
        job = office.submit(loaded)
        typer.echo(job)
        if wait:
            _follow(office, job)  # under another name, if a site came back


@app.command()
def status(kit: Kit = OFFICE) -> None:
    """Which sites are connected, and how every job stands."""
    with _office(kit) as office:
        here = office.connected()
        for name in office.sites:
            typer.echo(f"site {name}: {'connected' if name in here else 'not connected'}")
        for job in office.jobs():
            name, state = str(job.get("job_id")), str(job.get("status", "")).lower()
            next_ = office.successor(name) if state.startswith("finished") else None
            typer.echo(f"job {name}  {job.get('job_name')}  {state}{f', went on as {next_}' if next_ else ''}")


@app.command()
def log(
    job: Job,
    kit: Kit = OFFICE,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job is over.")] = False,
) -> None:
    """Print a run's journal, one JSON object per line."""
    with _office(kit) as office:
        if follow:
            _follow(office, job)
            return
        for event in office.journal(job):
            typer.echo(json.dumps(event))


@app.command()
def stop(job: Job, kit: Kit = OFFICE) -> None:
    """End a job; what was committed is saved, and `resume` goes on."""
    with _office(kit) as office:
        last = office.latest(job)
        if last != job:
            typer.echo(f"job {job} went on as {last}, which is stopped", err=True)
        office.stop(last)
        typer.echo(office.wait(last, 120.0).lower())


@app.command()
def resume(
    job: Job,
    kit: Kit = OFFICE,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
) -> None:
    """Go on with the run of a job that ended early, as a new job; prints its name."""
    with _office(kit) as office:
        new = office.resume(job)
        typer.echo(new)
        if wait:
            _follow(office, new)


@app.command()
def fetch(job: Job, runs: Runs = Path("runs"), kit: Kit = OFFICE) -> None:
    """Copy the run folder of a job that is over from the server, and print it."""
    with _office(kit) as office:
        typer.echo(str(office.fetch(job, runs)))


@app.command()
def forecast(
    study: StudyFile,
    changes: Changes = None,
    mbit: Annotated[float, typer.Option(min=0.01, help="The link of one site, in megabits per second.")] = 100.0,
    sites: Annotated[int | None, typer.Option(min=1, help="How many sites; by default the study's.")] = None,
    kit: Kit = OFFICE,
) -> None:
    """Say what a study will send: bytes per round and site, and how long that takes.

    Neither data nor server are needed. Where the data are not, the study has its [facts], and the sites are the kit's.
    """
    from consilium.federation.forecasting import forecast_study
    from consilium.files import read_json
    from consilium.study import load_study

    facts = kit / "consilium.json"
    known = read_json(facts)["sites"] if facts.is_file() else ()
    for line in forecast_study(load_study(study, changes or []), sites, known).lines(mbit):
        typer.echo(line)


@app.command("try")
def try_(
    study: StudyFile,
    changes: Changes = None,
    sites: Annotated[int | None, typer.Option(min=1, help="Only the first so many sites.")] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Run a study as a federation of local processes, from kits to results, and take everything down again."""
    from consilium.study import load_study

    loaded = load_study(study, changes or [])
    require_flare()
    from consilium.federation.trial import try_federation

    typer.echo(str(try_federation(loaded, sites, runs)))


def _supervise(kit: Path, kind: str, hospital: Path | None, code: Sequence[str] = (), resume: bool = True) -> None:
    require_flare()
    from consilium.federation.supervisor import supervise

    supervise(kit, kind, hospital, code, resume)


def _office(kit: Path) -> Any:
    require_flare()
    from consilium.federation.office import open_office

    return open_office(kit)


def _follow(office: Any, job: str) -> None:
    from consilium.cli.progress import Progress

    seen = 0
    with Progress() as progress:
        while True:
            over = office.over(job)
            events = office.journal(job, seen)
            for event in events:
                progress.show(event)
            seen += len(events)
            next_ = office.awaited_successor(job) if over else None
            if over and next_ is None:
                break
            job = next_ or job
            time.sleep(1.0)
    outcome = office.outcome(job)
    if outcome["state"] != "finished":
        raise WorkError(str(outcome["said"]))
    if outcome["said"]:
        typer.echo(f"note: {outcome['said']}", err=True)


def add_to(main: typer.Typer) -> None:
    main.add_typer(app, name="federation", rich_help_panel="Train")
