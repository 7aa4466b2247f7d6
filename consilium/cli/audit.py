"""The command that attacks a run's models: audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli import completing
from consilium.cli.progress import kept
from consilium.cli.train import Json, Quiet


def audit(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="A finished run folder, its data still there; several share one figure of their uncertainty.",
            metavar="RUN",
            autocompletion=completing.runs,
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="The loss threshold and the shadow attack only, with short shadows.")
    ] = False,
    shadows: Annotated[int, typer.Option(help="Of the likelihood-ratio attack: how many, even.")] = 16,
    inversion: Annotated[
        bool,
        typer.Option("--inversion", help="Also draw which images one update of 1 and of 8 cases shows; a minute."),
    ] = False,
    to: Annotated[
        Path | None, typer.Option(help="Where the files go; else `audit` in the run folder.", metavar="DIR")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Attack every model of a run: can one tell who was in its training data? A table and a verdict on each.

    Example: consilium audit runs/fedsm-s0-1a2b3c4d --quick
    """
    from consilium.audit.auditing import AuditOptions, write_audit, write_inversion, write_uncertainty
    from consilium.audit.auditing import audit as audit_run
    from consilium.audit.tables import show

    def say(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    documents, files = [], list[Path]()
    for run in runs:
        place = to / run.resolve().name if to and len(runs) > 1 else to
        options = AuditOptions(quick, shadows, keep=place)
        with kept("the same command", "Finished shadows"):
            found = audit_run(run, options, say=say)
        documents.append(found.to_json())
        files += write_audit(found, place)
        if inversion:
            say("inverting one update of 1 and one of 8 cases")
            files += write_inversion(run, place)
        if not as_json:
            show(documents[-1])
    if len(runs) > 1:
        files += write_uncertainty(documents, to or runs[0] / "audit")
    if as_json:
        typer.echo(json.dumps(documents[0] if len(runs) == 1 else {"audits": documents}, allow_nan=False))
        return
    for path in files:
        typer.echo(str(path))


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Look")(audit)
