"""Commands about data: phantom, check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.train import Json
from consilium.errors import DataError, StudyError


def phantom(
    kind: Annotated[str, typer.Argument(help="What to draw: retina, prostate, abdomen.")],
    to: Annotated[Path, typer.Option(help="The federation's folder; it must be new or empty.", metavar="DIR")],
    cases: Annotated[
        int | None, typer.Option(help="All cases of all sites and splits; by default as many as in the paper.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Pixels per side; by default 256, of the abdomen 64.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws other patients.")] = 0,
    division: Annotated[
        int | None,
        typer.Option(help="Which of the UFPS paper's class divisions the abdomen's sites annotate: 1, 2, 3."),
    ] = None,
) -> None:
    """Write a synthetic federation as site folders.

    Example: consilium phantom retina --to data/retina --cases 440 --size 64
    """
    from consilium.data.check import counts
    from consilium.data.phantoms import write_phantom
    from consilium.data.site_folder import read_federation

    write_phantom(kind, to, cases, size, seed, division)
    for site, splits in counts(read_federation(to)).items():
        typer.echo(f"{site}: " + ", ".join(f"{n} {split}" for split, n in splits.items() if n), err=True)
    typer.echo(str(to))


def check(
    folder: Annotated[Path, typer.Argument(help="A federation's folder.", metavar="DIR")],
    split: Annotated[
        str | None,
        typer.Option(help="Draw empty splits by patient with these shares, e.g. 0.5,0.25,0.25, and write them."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the draw.")] = 0,
    fix: Annotated[bool, typer.Option("--fix", help="Copy the federation to --to without its broken cases.")] = False,
    to: Annotated[Path | None, typer.Option(help="Where --fix writes.", metavar="DIR")] = None,
    as_json: Json = False,
) -> None:
    """Say what is wrong with a federation, in words: every table, image and mask, none hidden behind the first."""
    from dataclasses import asdict

    from consilium.data import check as doctor
    from consilium.data.splits import draw_splits

    if split is not None:
        draw_splits(folder, _shares(split), seed)
    if fix:
        if to is None:
            raise StudyError("--fix needs --to DIR: the original is never changed.")
        left_out = doctor.fix(folder, to)
        for line in left_out:
            typer.echo(line, err=True)
        folder = to
    elif to is not None:
        raise StudyError("--to goes with --fix.")
    finding = doctor.check(folder)
    if as_json:
        typer.echo(json.dumps({
            "faults": [asdict(fault) for fault in finding.faults],
            "notes": list(finding.notes),
            "counts": finding.counts,
        }))  # fmt: skip
    else:
        _show(finding, folder)
    if finding.faults:
        many = len(finding.faults)
        raise DataError(f"{folder} has {many} fault{'s' if many > 1 else ''}; training would refuse it.")


def _show(finding: object, folder: Path) -> None:
    from consilium.data.check import Finding

    assert isinstance(finding, Finding)
    for site, splits in finding.counts.items():
        said = ", ".join(f"{n} {'not yet split' if split == 'empty' else split}" for split, n in splits.items() if n)
        typer.echo(f"{site}: {said or 'no cases'}")
    for fault in finding.faults:
        typer.echo(f"fault: {fault}")
    for note in finding.notes:
        typer.echo(f"note: {note}")
    if not finding.faults:
        typer.echo(f"{folder} is sound.")


def _shares(text: str) -> tuple[float, float, float]:
    try:
        train, valid, test = (float(part) for part in text.split(","))
    except ValueError:
        raise StudyError(f"--split {text}: write three shares, for instance 0.5,0.25,0.25.") from None
    return train, valid, test


def add_to(app: typer.Typer) -> None:
    for command in (phantom, check):
        app.command(rich_help_panel="Data")(command)
