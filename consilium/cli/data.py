"""Commands about data: phantom, import, partition, check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilium.cli.train import Json
from consilium.errors import DataError, StudyError

if TYPE_CHECKING:
    from consilium.data.site_folder import Federation


def phantom(
    kind: Annotated[str, typer.Argument(help="What to draw: retina, prostate, abdomen, digits.")],
    to: Annotated[Path, typer.Option(help="The federation's folder; it must be new or empty.", metavar="DIR")],
    cases: Annotated[
        int | None,
        typer.Option(help="All cases of all sites and splits; by default as many as in the paper, 7000 digits."),
    ] = None,
    size: Annotated[int | None, typer.Option(help="Pixels per side; by default 256, abdomen 64, digits 28.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws other patients.")] = 0,
    sites: Annotated[
        int | None, typer.Option(help="Digits only: how many sites; 1 writes one site of all classes; by default 12.")
    ] = None,
    division: Annotated[
        int | None,
        typer.Option(help="Abdomen only: which class division of the UFPS paper its sites annotate: 1, 2, 3."),
    ] = None,
    unlabelled: Annotated[
        int, typer.Option(min=0, help="Abdomen only: so many more training cases, without a mask.")
    ] = 0,
    alike: Annotated[
        float, typer.Option(help="Retina only: this share of each site's patients has its partner's camera, 0 to 0.5.")
    ] = 0.0,
) -> None:
    """Write a synthetic federation as site folders.

    Example: consilium phantom retina --to data/retina --cases 440 --size 64
    """
    from consilium.data.phantoms import write_phantom
    from consilium.data.site_folder import read_federation

    write_phantom(kind, to, cases, size, seed, sites, division, unlabelled, alike)
    _say_sites(read_federation(to))
    typer.echo(str(to))


def import_(
    name: Annotated[str, typer.Argument(help="The dataset: mnist, cifar10, medmnist, mednist.")],
    source: Annotated[list[Path], typer.Argument(help="Its files as published, or the folder they are in.")],
    to: Annotated[Path, typer.Option(help="The federation's folder; it must be new or empty.", metavar="DIR")],
    site: Annotated[str | None, typer.Option(help="The site's name; by default the dataset's.", metavar="NAME")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw of validation (and of missing test) cases.")] = 0,
) -> None:
    """Turn a published dataset's own layout into a site folder, in a federation of one site.

    Example: consilium import mnist downloads/mnist --to data/mnist
    """
    from consilium.data.importers import import_dataset

    _say_sites(import_dataset(name, source, to, site, seed))
    typer.echo(str(to))


def partition(
    site: Annotated[Path, typer.Argument(help="A site's folder, or a federation of one site.", metavar="SITE")],
    to: Annotated[Path, typer.Option(help="The new federation's folder; it must be new or empty.", metavar="DIR")],
    scheme: Annotated[str, typer.Option(help="pathological, practical or dirichlet.")],
    sites: Annotated[int, typer.Option(help="How many sites to make.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Another seed cuts another way.")] = 0,
    classes_per_site: Annotated[int | None, typer.Option(help="Of pathological; by default 2.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Of dirichlet: small is uneven; by default 0.5.")] = None,
    share: Annotated[float, typer.Option(help="Keep this share of the cases of every class.")] = 1.0,
) -> None:
    """Cut one site of a classification into a federation whose sites hold different classes.

    Example: consilium partition data/mnist --to data/mnist-12 --scheme practical --sites 12 --seed 0
    """
    from consilium.data.partition import Cut, holdings
    from consilium.data.partition import partition as cut
    from consilium.reports.holdings import draw, write_table

    federation = cut(site, to, Cut(scheme, sites, seed, classes_per_site, alpha, share))
    held = holdings(federation)
    write_table(held, to / "partition.csv")
    draw(held, to / "partition.png")
    _say_sites(federation)
    for label in federation.labels:
        if not any(sum(classes[label].values()) for classes in held.values()):
            typer.echo(f"no site holds the class {label!r}; its cases are left out.", err=True)
    typer.echo(str(to))


def _say_sites(federation: Federation) -> None:
    from consilium.data.check import counts, unlabelled

    bare = unlabelled(federation)
    for site, splits in counts(federation).items():
        said = ", ".join(f"{n} {split}" for split, n in splits.items() if n)
        said += f"; {bare[site]} without a mask" if site in bare else ""
        if federation.task == "classification":
            seen = {case.label for case in federation.sites[site].cases}
            own = [label for label in federation.labels if label in seen]
            said += f"; classes {', '.join(own)}" if len(own) < len(federation.labels) else "; all classes"
        typer.echo(f"{site}: {said}", err=True)


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
            "unlabelled": finding.unlabelled,
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
    for command in (phantom, partition, check):
        app.command(rich_help_panel="Data")(command)
    app.command("import", rich_help_panel="Data")(import_)
