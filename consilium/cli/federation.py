"""Commands of a real federation: its kits, its processes, its jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from consilium.cli import hospital as hospital_commands
from consilium.cli.kits import app as kits
from consilium.cli.standing import endings, standing_of
from consilium.cli.train import Quiet
from consilium.cli.watch import Host, Port, Token, serve
from consilium.errors import WorkError
from consilium.federation import require_flare

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Run a real federation between machines, on NVIDIA FLARE (install the extra 'federation').",
)

Kit = Annotated[Path, typer.Option("--kit", help="An administrator's kit.", metavar="DIR")]
Job = Annotated[
    str, typer.Argument(help="The job's name, as printed by `submit` and `status`, or its start.", metavar="JOB")
]
StudyFile = Annotated[Path, typer.Argument(help="The study, a TOML file.", metavar="STUDY.toml")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a key of the study; may be repeated.", metavar="KEY=VALUE"),
]
Runs = Annotated[Path, typer.Option(help="The folder for the run folder.", metavar="DIR")]
Metrics = Annotated[
    str,
    typer.Option(help="Serve /metrics (Prometheus) and /health there; a port alone is on loopback.", metavar="PORT"),
]
ADMIN = Path("kits/admin")


@app.command()
def init(
    to: Annotated[Path, typer.Argument(help="The project file to write.", metavar="FILE.toml")],
    server: Annotated[str, typer.Option(help="The name or address of the server, as seen from all sites.")],
    site: Annotated[list[str], typer.Option(help="A site's name; repeat the option for each site.")],
    name: Annotated[str, typer.Option(help="The consortium's name.")] = "consortium",
    port: Annotated[int, typer.Option(help="The server's port.")] = 8002,
    admin: Annotated[
        list[str] | None,
        typer.Option(help="One more administrator, and what it may do: submit or watch.", metavar="NAME=ROLE"),
    ] = None,
) -> None:
    """Write the project file: the participants and the server's address."""
    from consilium.federation.project import Project

    admins = {who: role for who, _, role in (text.partition("=") for text in admin or [])}
    Project(name, server, port, tuple(site), admins).write(to)
    typer.echo(str(to))


@app.command()
def server(
    kit: Annotated[Path, typer.Argument(help="The server's kit.", metavar="KIT")],
    code: Annotated[
        list[str] | None,
        typer.Option(help="Own code that studies may name; may be repeated.", metavar="MODULE:CLASS"),
    ] = None,
    resume: Annotated[bool, typer.Option(help="After a crash of the server, resume its runs automatically.")] = True,
    metrics: Metrics = "",
) -> None:
    """Keep the server running until it is stopped (Ctrl-C or SIGTERM)."""
    _supervise(kit, "server", None, code or [], resume, metrics)


@app.command()
def site(
    kit: Annotated[Path, typer.Argument(help="This hospital's kit.", metavar="KIT")],
    hospital: Annotated[Path, typer.Option(help="This hospital's settings.", metavar="FILE.toml")] = Path(
        "hospital.toml"
    ),
    example: Annotated[bool, typer.Option("--example", help="Write an example of the settings and stop.")] = False,
    metrics: Metrics = "",
) -> None:
    """Keep this hospital's site running until it is stopped (Ctrl-C or SIGTERM)."""
    if example:
        from consilium.federation.supervisor import kit_of

        kit_of(kit, "site")
        from consilium.hospital import write_example  # it needs torch, which no supervisor shall hold

        typer.echo(str(write_example(hospital, kit)))
        return
    _supervise(kit, "site", hospital, metrics=metrics)


@app.command()
def service(
    kit: Annotated[Path, typer.Argument(help="The kit of the server or of a site.", metavar="KIT")],
    to: Annotated[Path, typer.Option(help="The unit to write.", metavar="FILE.service")],
    hospital: Annotated[Path | None, typer.Option(help="A site's settings.", metavar="FILE.toml")] = None,
    user: Annotated[str, typer.Option(help="The user of this machine that it runs as; not root.")] = "consilium",
    metrics: Metrics = "",
) -> None:
    """Write a systemd unit that keeps a server or a site running, in a sandbox."""
    from consilium.federation.services import write_service

    typer.echo(str(write_service(kit, hospital, to, user, metrics)))


@app.command()
def submit(
    study: StudyFile,
    changes: Changes = None,
    kit: Kit = ADMIN,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Train in a new run folder although a run of this study exists.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Send a study to the server and print the job's name; a job contains no data and no code."""
    from consilium.study_reading import load_study

    loaded = load_study(study, changes or [])
    with _admin(kit) as admin:
        job = admin.submit(loaded, again)
        typer.echo(job)
        if wait:
            _follow(admin, job, quiet)  # under another name, if a site came back


@app.command()
def status(kit: Kit = ADMIN) -> None:
    """Print which sites are connected, and the state of every job."""
    with _admin(kit) as admin:
        here, standing = admin.connected(), admin.standing()
        for name in (*admin.sites, *sorted(set(here) - set(admin.sites))):
            typer.echo(f"site {name}: {standing_of(standing.get(name, {})) if name in here else 'not connected'}")
        for warning in endings(kit, standing):
            typer.echo(f"warning: {warning}", err=True)
        for job in admin.jobs():
            name, state = str(job.get("job_id")), str(job.get("status", "")).lower()
            typer.echo(f"job {name}  {job.get('job_name')}  {state}{admin.ending(name)}")


@app.command()
def log(
    job: Job,
    kit: Kit = ADMIN,
    follow: Annotated[bool, typer.Option("--follow", help="Print new events until the job ends.")] = False,
) -> None:
    """Print a run's journal, one JSON object per line."""
    with _admin(kit) as admin:
        job = admin.named(job)
        if follow:
            _end(admin, admin.follow(job, lambda event: typer.echo(json.dumps(event))))
            return
        for event in admin.journal(job):
            typer.echo(json.dumps(event))


@app.command()
def watch(job: Job, kit: Kit = ADMIN, host: Host = "127.0.0.1", port: Port = 0, token: Token = "") -> None:
    """Serve one page about a job while it is under way, as `consilium watch` does for a run folder."""
    from consilium.watching.sources import JobSource

    with _admin(kit) as admin:  # the run may go on as a later job
        job = admin.named(job)
        serve(
            JobSource(
                job, lambda after: admin.journal(admin.latest(job), after), lambda: admin.over(admin.latest(job))
            ),
            host,
            port,
            token,
        )


@app.command()
def stop(job: Job, kit: Kit = ADMIN) -> None:
    """End a job; committed rounds are saved, and `resume` continues the run."""
    with _admin(kit) as admin:
        job = admin.named(job)
        last = admin.latest(job)
        if last != job:
            typer.echo(f"job {job} was resumed as {last}; stopping {last}", err=True)
        admin.stop(last)
        typer.echo(admin.wait(last, 120.0).lower())


@app.command()
def resume(
    job: Job,
    kit: Kit = ADMIN,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
    quiet: Quiet = False,
) -> None:
    """Resume the run of a job that ended early, as a new job, and print its name."""
    with _admin(kit) as admin:
        new = admin.resume(admin.named(job))
        typer.echo(new)
        if wait:
            _follow(admin, new, quiet)


@app.command()
def fetch(job: Job, runs: Runs = Path("runs"), kit: Kit = ADMIN) -> None:
    """Copy the run folder of a finished job from the server, and print its path."""
    with _admin(kit) as admin:
        job = admin.named(job)
        path = admin.fetch(job, runs)
        if said := admin.outcome(job)["said"]:
            typer.echo(f"note: {said}", err=True)
        typer.echo(str(path))


@app.command()
def forecast(
    study: StudyFile,
    changes: Changes = None,
    mbit: Annotated[float, typer.Option(min=0.01, help="The link of one site, in megabits per second.")] = 100.0,
    sites: Annotated[int | None, typer.Option(min=1, help="Number of sites; by default the study's.")] = None,
    kit: Kit = ADMIN,
) -> None:
    """Forecast the traffic of a study: bytes per round and site, and the time they take.

    It needs no server. Without data, the study must have a section `facts`, and the sites come from the kit.
    """
    from consilium.federation.forecasting import forecast_study
    from consilium.files import read_json
    from consilium.study_reading import load_study

    facts = kit / "consilium.json"
    known = read_json(facts)["sites"] if facts.is_file() else ()
    for line in forecast_study(load_study(study, changes or []), sites, known).lines(mbit):
        typer.echo(line)


@app.command("try")
def try_(
    study: StudyFile,
    changes: Changes = None,
    sites: Annotated[
        int | None, typer.Option(min=1, help="Number of sites to use, from the first; by default all.")
    ] = None,
    runs: Runs = Path("runs"),
    quiet: Quiet = False,
) -> None:
    """Run a study as a federation of local processes, from kits to results, and stop them all at the end."""
    from consilium.study_reading import load_study

    loaded = load_study(study, changes or [])
    require_flare()
    from consilium.cli.progress import ProgressDisplay
    from consilium.federation.trial import try_federation

    with ProgressDisplay(quiet) as progress:
        folder = try_federation(loaded, sites, runs, progress.say, progress.show)
    typer.echo(str(folder))


def _supervise(
    kit: Path, kind: str, hospital: Path | None, code: Sequence[str] = (), resume: bool = True, metrics: str = ""
) -> None:
    require_flare()
    from consilium.federation.supervisor import supervise

    supervise(kit, kind, hospital, code, resume, metrics)


def _admin(kit: Path) -> Any:
    require_flare()
    from consilium.federation.admin import open_admin

    return open_admin(kit)


def _follow(admin: Any, job: str, quiet: bool) -> None:
    from consilium.cli.progress import ProgressDisplay

    with ProgressDisplay(quiet) as progress:
        job = admin.follow(job, progress.show)
    _end(admin, job)


def _end(admin: Any, job: str) -> None:
    """What is to be said of a job that is over; a failure ends the command."""
    outcome = admin.outcome(job)
    if outcome["state"] != "finished":
        raise WorkError(str(outcome["said"]))
    if outcome["said"]:
        typer.echo(f"note: {outcome['said']}", err=True)


def add_to(main: typer.Typer) -> None:
    app.add_typer(kits, name="kits")
    hospital_commands.add_to(app)
    main.add_typer(app, name="federation", rich_help_panel="Train")
