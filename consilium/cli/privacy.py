"""Commands about privacy: ledger."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from consilium.cli.train import Json
from consilium.errors import RunError
from consilium.wording import counted

if TYPE_CHECKING:
    from consilium.left_log import ChainCheck
    from consilium.privacy.dp import Privacy
    from consilium.privacy.ledger import Entry


def ledger(
    folder: Annotated[Path, typer.Argument(help="A run, or a hospital's memory folder.", metavar="FOLDER")],
    delta: Annotated[
        float | None, typer.Option(help="δ at which ε is told; by default a run's own, else 1e-5.")
    ] = None,
    accountant: Annotated[
        str | None, typer.Option(help="rdp, or prv: tighter and slower; by default a run's own, else rdp.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What every site's messages cost its patients: each release with its noise, ε and δ, and what has no noise.

    It also checks the chain of the log, names the first line that is not what was written, and then ends with 1.

    Example: consilium ledger runs/fedavg-s0-1a2b3c4d
    """
    from consilium.left_log import LOG, check_chain, left
    from consilium.privacy.ledger import ledger as entries_of
    from consilium.privacy.ledger import totals

    privacy = _told_by(folder, delta, accountant)
    delta, accountant = privacy.delta, privacy.accountant
    places = {path.name: path for path in sorted((folder / "sites").glob("*")) if (path / LOG).exists()}
    if not places and any(True for _ in left(folder)):
        places = {folder.name: folder}
    if not places:
        raise RunError(
            f"{folder} holds no ledger: a simulation keeps one of a study with [privacy], in sites/, and a hospital "
            "one of all studies, in its memory folder."
        )
    found: dict[str, tuple[list[Entry], dict[str, Any]]] = {}
    for name, place in places.items():
        entries = entries_of(left(place))
        found[name] = entries, totals(entries, delta, accountant)
    chains = {name: check_chain(place) for name, place in places.items()}
    if as_json:
        documents = {
            name: {**told, "releases": [_plain(entry) for entry in entries], "faults": chains[name].faults}
            for name, (entries, told) in found.items()
        }
        typer.echo(json.dumps(documents))
    else:
        for name, (entries, told) in found.items():
            spent = "without bound" if told["epsilon"] is None else f"{told['epsilon']:.3g}"
            typer.echo(f"{name}: ε {spent} at δ {delta:g} ({told['accountant']}, {counted(told['draws'], 'draw')})")
            for line in _lines(entries):
                typer.echo(f"  {line}")
            if not chains[name].faults:
                typer.echo(f"  log: {counted(chains[name].lines, 'line')}{_chained(chains[name])}")
    for name, chain in chains.items():
        for fault in chain.faults:
            typer.echo(f"{places[name] / LOG}: {fault}", err=True)
    if any(chain.faults for chain in chains.values()):
        raise typer.Exit(1)


def _chained(chain: ChainCheck) -> str:
    if chain.chained == chain.lines:
        return ", each as it was written"
    return f", the first {chain.lines - chain.chained} of an earlier version, without a chain"


def _told_by(folder: Path, delta: float | None, accountant: str | None) -> Privacy:
    """δ and the accountant: those given, else those of the run's study."""
    from consilium.privacy.dp import Privacy
    from consilium.run_folder import RunFolder

    own = RunFolder.open(folder).study.privacy if (folder / "study.toml").is_file() else Privacy()
    return Privacy(delta=delta or own.delta, accountant=accountant or own.accountant)  # says what is wrong with them


def _plain(entry: Entry) -> dict[str, Any]:
    return {"run": entry.run, "round": entry.round, **asdict(entry.spent)}


def _lines(entries: Any) -> list[str]:
    """One line per kind of release: releases that are alike are counted."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for entry in entries:
        s = entry.spent
        groups.setdefault((s.of, s.kind, s.what, s.noise, s.rate, s.steps), []).append(entry.round or 0)
    lines = []
    for (of, kind, what, noise, rate, steps), rounds in groups.items():
        when = _when(rounds)
        how = {
            "dp-sgd": f"DP-SGD, noise {noise:.3g}, {steps} draws of rate {rate:.3g}",
            "gaussian": f"noise {noise:.3g}",
        }.get(kind, "unprotected")
        lines.append(f"{', '.join(what)} ({of}): {how}, {when}")
    return lines


def _when(rounds: list[int]) -> str:
    """In which rounds; 0 is the roll call."""
    if not any(rounds):
        return "at roll call" if len(rounds) == 1 else f"at {len(rounds)} roll calls"
    if len(rounds) == 1:
        return f"round {rounds[0]}"
    first, last = min(rounds), max(rounds)
    return f"{len(rounds)} times, " + (f"rounds {first} to {last}" if last > first else f"round {first}")


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Look")(ledger)
