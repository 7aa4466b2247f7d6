"""Commands for the people of a hospital: review, budget, clean."""

from __future__ import annotations

import dataclasses
import getpass
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilium.cli.train import Json
from consilium.errors import DataError, StudyError
from consilium.wording import counted

if TYPE_CHECKING:
    from consilium.consent import Decision, Decisions
    from consilium.hospital import Hospital
    from consilium.study import Study

HospitalFile = Annotated[Path, typer.Option("--hospital", help="This hospital's settings.", metavar="FILE.toml")]
SETTINGS = Path("hospital.toml")


def review(
    study: Annotated[
        str, typer.Argument(help="The beginning of a study's hash as the list shows it, or a file.", metavar="[STUDY]")
    ] = "",
    hospital: HospitalFile = SETTINGS,
    approve: Annotated[bool, typer.Option("--approve", help="Let this study run here.")] = False,
    reject: Annotated[bool, typer.Option("--reject", help="Do not let it run, now or later.")] = False,
    why: Annotated[str, typer.Option(help="A reason; it stays here.", metavar="TEXT")] = "",
    by: Annotated[str, typer.Option(help="Who decides; by default the user of this machine.", metavar="NAME")] = "",
    as_json: Json = False,
) -> None:
    """List the studies that wait for approval, show one in plain words, and approve or reject it.

    hospital.toml asks for it with `approval = true`. A decision is of one study, to the last setting.
    """
    from consilium.consent import APPROVED, REJECTED, Decision, Decisions, study_digest
    from consilium.hospital import read_hospital
    from consilium.left_lines import now
    from consilium.policy import read_key
    from consilium.reviewing import in_words

    if approve and reject:
        raise StudyError("--approve and --reject: choose one.")
    settings = read_hospital(hospital)
    _refuse_root(Path(settings.memory))
    decisions = Decisions(Path(settings.memory), read_key(Path(settings.memory) / "key"))
    if not study:
        if approve or reject:
            raise StudyError("name the study to decide on, by the beginning of its hash; without one, they are listed.")
        _list(decisions, settings, as_json)
        return
    found = _found(study, decisions, settings)
    digest = study_digest(found)
    if approve or reject:
        who = by or getpass.getuser()
        decisions.decide(found, Decision(digest, APPROVED if approve else REJECTED, who, now(), why))
    decision = decisions.of(digest)
    if as_json:
        told = dataclasses.asdict(decision) if decision else None
        typer.echo(json.dumps({"study": digest, "words": list(in_words(found, settings)), "decision": told}))
        return
    if not (approve or reject):
        for line in in_words(found, settings):
            typer.echo(line)
        typer.echo("")
    typer.echo(_said(decision, study, hospital))


def _refuse_root(memory: Path) -> None:
    """Of another user's site: that user could not read the key and the decisions that root writes."""
    import pwd

    owner = memory.stat().st_uid if memory.is_dir() else os.geteuid()
    if os.geteuid() != 0 or owner == 0:
        return
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = f"#{owner}"
    raise DataError(
        f"{memory} belongs to the user '{name}', who could not read what root decides there; repeat the command as "
        f"that user, with `sudo -u {name}` before it."
    )


def _said(decision: Decision | None, study: str, hospital: Path) -> str:
    if decision is None:
        command = f"consilium federation review {study} --hospital {hospital}"
        return f"Not decided: `{command} --approve`, or `--reject --why TEXT`."
    reason = f": {decision.why}" if decision.why else ""
    return f"{decision.verdict} by {decision.by} on {decision.time}{reason}"


def _list(decisions: Decisions, settings: Hospital, as_json: bool) -> None:
    from consilium.reviewing import read_waiting, short

    rows = []
    for found in decisions.all():
        state = found.decision.verdict if found.decision else "waiting"
        try:
            words = short(read_waiting(found, settings))
        except StudyError as error:
            words = str(error)
        rows.append({"study": found.digest, "state": state, "about": words})
    if as_json:
        typer.echo(json.dumps({"studies": rows}))
        return
    for row in rows:
        typer.echo(f"{row['state']:<8}  {row['study'][:12]}  {row['about']}")
    if not rows:
        on = "" if settings.limits.approval else "; hospital.toml does not ask for approval ([limits] approval = true)"
        typer.echo(f"no study waits{on}")


def _found(name: str, decisions: Decisions, settings: Hospital) -> Study:
    """A study that was kept, by the beginning of its hash; or one of a file, which nobody need have submitted."""
    from consilium.reviewing import read_waiting
    from consilium.study_reading import load_study

    if name.endswith(".toml"):
        return load_study(Path(name))
    kept = [found for found in decisions.all() if found.digest.startswith(name)]
    if len(kept) == 1:
        return read_waiting(kept[0], settings)
    if kept:
        raise StudyError(f"{len(kept)} studies begin with '{name}'; write more of the hash.")
    raise StudyError(f"no study that was kept here begins with '{name}'; `consilium federation review` lists them.")


def budget(hospital: HospitalFile = SETTINGS, as_json: Json = False) -> None:
    """Show how much of every limit of hospital.toml is used: rounds, scorings, bytes, ε, seconds, disk."""
    from consilium.budget import budgets
    from consilium.hospital import read_hospital
    from consilium.left_log import LOG, check_chain

    settings = read_hospital(hospital)
    memory = Path(settings.memory)
    found = budgets(memory, settings.limits)
    chain = check_chain(memory)
    if as_json:
        rows = [{**dataclasses.asdict(use), "used": use.used if math.isfinite(use.used) else None} for use in found]
        typer.echo(json.dumps({"budgets": rows, "faults": list(chain.faults)}))
        return
    study = ""
    typer.echo("all studies")
    for use in found:
        if use.study != study:
            study = use.study
            typer.echo(study)
        typer.echo(f"  {use.text}")
    for fault in chain.faults:
        typer.echo(f"{memory / LOG}: {fault}; what is missing is counted as if it had cost the most", err=True)


def clean(
    hospital: Annotated[
        Path | None,
        typer.Option("--hospital", help="A hospital's settings; hospital.toml where no kit is named.", metavar="FILE"),
    ] = None,
    kit: Annotated[Path | None, typer.Option("--kit", help="A site's or the server's kit.", metavar="DIR")] = None,
    older: Annotated[
        float | None,
        typer.Option(
            min=1, help="Days for memories and jobs, not those of hospital.toml; a server needs it.", metavar="DAYS"
        ),
    ] = None,
    runs: Annotated[bool, typer.Option("--runs", help="At a server: remove run folders too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it they are only listed.")] = False,
) -> None:
    """Remove memories, releases and files of jobs that nobody has used for long; by default it only lists them.

    The log of what left, the key and decisions on studies are never removed.
    """
    from consilium.federation.cleaning import of_hospital, of_server, remove
    from consilium.federation.forecasting import size_text
    from consilium.federation.supervisor import kit_of
    from consilium.hospital import read_hospital

    if kit is not None:
        kit_of(kit, "server" if hospital is None else "site")
    if hospital is not None or kit is None:
        found = of_hospital(read_hospital(hospital or SETTINGS), kit, older)
    elif older is not None:
        found = of_server(kit, older, runs)
    else:
        raise DataError("name a hospital with --hospital FILE.toml, or a server with --kit DIR and --older DAYS.")
    for item in found:
        typer.echo(f"{item.kind:<8} {item.name}  {size_text(item.size)}, unused for {counted(round(item.days), 'day')}")
    total = size_text(sum(item.size for item in found))
    if yes:
        remove(found)
        typer.echo(f"removed {total}")
    else:
        typer.echo(f"{total} would be removed; --yes removes them" if found else "nothing to remove")


def add_to(app: typer.Typer) -> None:
    for command in (review, budget, clean):
        app.command()(command)
