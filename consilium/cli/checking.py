"""The command `check`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilium.cli.data import split_shares
from consilium.cli.train import Json
from consilium.errors import DataError, StudyError

if TYPE_CHECKING:
    from consilium.data.check import CheckResult


def check(
    folder: Annotated[
        Path, typer.Argument(help="A federation's folder; with --study also one site's own.", metavar="DIR")
    ],
    split: Annotated[
        str | None,
        typer.Option(help="Draw the empty splits by patient with these shares, e.g. 0.5,0.25,0.25, and write them."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the draw.")] = 0,
    fix: Annotated[
        bool, typer.Option("--fix", help="Copy to --to: repair what is safe, leave out broken cases and leaks.")
    ] = False,
    to: Annotated[Path | None, typer.Option(help="The folder for the copy of --fix.", metavar="DIR")] = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Write a page that shows the cases and compares the sites.", metavar="FILE.html"),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(
            help="Also check whether the sites suit this study, for instance its batch size.", metavar="STUDY.toml"
        ),
    ] = None,
    counts: Annotated[
        Path | None,
        typer.Option(help="Write the number of findings of each kind, without names.", metavar="FILE.json"),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Number of reading processes; by default one per core for large federations."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every table, image and mask of a federation, and list every fault.

    Exit status 2 if there are faults, or if a test case is also trained on. A check that was stopped continues.
    Example: consilium check data/retina --page check.html
    """
    from dataclasses import asdict

    from consilium.data.splits import draw_splits

    if split is not None:
        draw_splits(folder, split_shares(split), seed)
    if fix:
        from consilium.data.fixing import fix as mend

        if to is None:
            raise StudyError("--fix needs --to DIR: the original is never changed.")
        for line in mend(folder, to):
            typer.echo(line, err=True)
        folder = to
    elif to is not None:
        raise StudyError("--to needs --fix; add --fix or leave --to out.")
    if page is not None:
        from consilium.reports.rendering import check_page_place

        check_page_place(page, DataError)
    finding = _checked(folder, study, workers)
    if counts is not None:
        from consilium.files import write_json

        write_json(finding.tally(), counts, durable=False)
    if as_json:
        typer.echo(json.dumps({
            "faults": [asdict(fault) for fault in finding.faults],
            "findings": [asdict(found) for found in finding.findings],
            "notes": list(finding.notes),
            "counts": finding.counts,
            "unlabelled": finding.unlabelled,
        }))  # fmt: skip
    else:
        _show(finding, folder)
    if page is not None:
        from consilium.reports.check_page import write_check_page

        write_check_page(finding, page)
        typer.echo(str(page), err=as_json)
    _refuse(finding, folder)


def _checked(folder: Path, study: Path | None, workers: int | None) -> CheckResult:
    """The result of a federation, or with a study of one site's own folder."""
    from consilium.cli.progress import counting, kept
    from consilium.data.check import check as examine
    from consilium.data.check import check_cases

    with kept("the same command", "Cases that were read"), counting("reading cases") as progress:
        if study is None:
            return examine(folder, None, workers, progress)
        from consilium.data.site_folder import read_own_site
        from consilium.study_reading import load_study

        told = load_study(study)
        batch, facts = told.local.batch_size, told.facts
        if (folder / "federation.toml").exists() or not (folder / "site.toml").exists():
            return examine(folder, batch, workers, progress)
        own = read_own_site(folder, facts.task, facts.labels, facts.dimensions, facts.channels, facts.contains)
        return check_cases(own, (), (), batch, workers, progress)


SHOWN = 5  # findings of one kind at one site; the others are counted


def _show(finding: CheckResult, folder: Path) -> None:
    for site, splits in finding.counts.items():
        said = ", ".join(f"{n} {'not yet split' if split == 'empty' else split}" for split, n in splits.items() if n)
        typer.echo(f"{site}: {said or 'no cases'}")
    for fault in finding.faults:
        typer.echo(f"fault: {fault}")
    number: Counter[tuple[str, str, str]] = Counter()
    for found in finding.findings:
        place = (found.severity, found.kind, found.site)
        number[place] += 1
        if number[place] <= SHOWN:
            typer.echo(f"{found.severity}: {found}")
    for (severity, kind, site), n in number.items():
        if n > SHOWN:
            where = f" of site {site!r}" if site else ""
            typer.echo(f"{severity}: {n - SHOWN} more of the kind '{kind}'{where}; --json and --page have all.")
    if not finding.faults and not finding.errors:
        typer.echo(f"{folder} is sound.")


def _refuse(finding: CheckResult, folder: Path) -> None:
    many, leaks = len(finding.faults), len(finding.errors)
    faults = f"{many} faults; correct them" if many > 1 else "1 fault; correct it"
    said = [f"has {faults} before training"] if many else []
    said += (
        [f"has {leaks} errors that make scores false" if leaks > 1 else "has 1 error that makes scores false"]
        if leaks
        else []
    )
    if said:
        raise DataError(f"{folder} {'; it '.join(said)}.")


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Data")(check)
