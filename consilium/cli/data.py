"""Commands about data: phantom, partition, plan, cache. `import` and `check` have files of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilium.cli.train import Json
from consilium.errors import StudyError
from consilium.wording import are, counted

if TYPE_CHECKING:
    from consilium.data.site_folder import Federation


def phantom(
    kind: Annotated[str, typer.Argument(help="retina, prostate, abdomen, digits, or your own file.py:function.")],
    to: Annotated[Path, typer.Option(help="The federation's folder; it must be new or empty.", metavar="DIR")],
    cases: Annotated[
        int | None,
        typer.Option(help="Number of cases of all sites and splits; by default as in the paper, 7000 digits."),
    ] = None,
    size: Annotated[int | None, typer.Option(help="Pixels per side; by default 256, abdomen 64, digits 28.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed; another seed draws other patients.")] = 0,
    sites: Annotated[
        int | None,
        typer.Option(help="Digits only: number of sites, by default 12; 1 writes one site with all classes."),
    ] = None,
    division: Annotated[
        int | None,
        typer.Option(help="Abdomen only: the class division of the UFPS paper that sites annotate: 1, 2 or 3."),
    ] = None,
    unlabelled: Annotated[
        int, typer.Option(min=0, help="Abdomen only: number of additional training cases without a mask.")
    ] = 0,
    alike: Annotated[
        float, typer.Option(help="Retina only: share of each site's patients with its partner's camera, 0 to 0.5.")
    ] = 0.0,
) -> None:
    """Write a synthetic federation as site folders.

    Example: consilium phantom retina --to data/retina --cases 440 --size 64
    """
    from consilium.data.phantoms import write_phantom
    from consilium.data.site_folder import read_federation

    write_phantom(kind, to, cases, size, seed, sites, division, unlabelled, alike)
    say_sites(read_federation(to))
    typer.echo(str(to))


def partition(
    site: Annotated[Path, typer.Argument(help="A site's folder, or a federation of one site.", metavar="SITE")],
    to: Annotated[Path, typer.Option(help="The new federation's folder; it must be new or empty.", metavar="DIR")],
    scheme: Annotated[str, typer.Option(help="pathological, practical or dirichlet.")],
    sites: Annotated[int, typer.Option(help="Number of sites.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="The seed; another seed draws another division.")] = 0,
    classes_per_site: Annotated[int | None, typer.Option(help="pathological: classes per site; by default 2.")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="dirichlet: concentration, by default 0.5; small values are uneven.")
    ] = None,
    share: Annotated[float, typer.Option(help="Keep this share of the cases of every class.")] = 1.0,
    test_share: Annotated[
        float | None, typer.Option(help="Of the test cases keep this share; by default as --share.")
    ] = None,
) -> None:
    """Split one classification site into a federation whose sites hold different classes.

    Example: consilium partition data/mnist --to data/mnist-12 --scheme practical --sites 12 --seed 0
    """
    from consilium.data.partition import Cut, holdings
    from consilium.data.partition import partition as cut
    from consilium.reports.holdings import draw, write_table

    federation = cut(site, to, Cut(scheme, sites, seed, classes_per_site, alpha, share, test_share))
    held = holdings(federation)
    write_table(held, to / "partition.csv")
    draw(held, to / "partition.png")
    say_sites(federation)
    for label in federation.labels:
        if not any(sum(classes[label].values()) for classes in held.values()):
            typer.echo(f"no site holds the class {label!r}; its cases are left out.", err=True)
    typer.echo(str(to))


def say_sites(federation: Federation) -> None:
    """Tell how many cases each site has."""
    from consilium.data.check import counts, unlabelled

    bare = unlabelled(federation)
    for site, splits in counts(federation).items():
        said = ", ".join(f"{n} {split}" for split, n in splits.items() if n)
        said += f"; {bare[site]} without a mask" if site in bare else ""
        annotated = federation.sites[site].annotated
        if federation.task == "segmentation" and annotated and set(annotated) != set(federation.labels):
            said += f"; annotates {', '.join(annotated)}"
        if federation.task == "classification":
            seen = {case.label for case in federation.sites[site].cases}
            own = [label for label in federation.labels if label in seen]
            said += f"; classes {', '.join(own)}" if len(own) < len(federation.labels) else "; all classes"
        typer.echo(f"{site}: {said}", err=True)


def split_shares(text: str) -> tuple[float, float, float]:
    """The shares of training, validation and test cases in the text of `--split`."""
    try:
        train, valid, test = (float(part) for part in text.split(","))
    except ValueError:
        raise StudyError(f"--split {text}: write three shares, for instance 0.5,0.25,0.25.") from None
    return train, valid, test


def plan(
    sources: Annotated[
        list[Path],
        typer.Argument(help="A federation's folder, or the fingerprints of its sites.", metavar="DIR | FILE.json ..."),
    ],
    to: Annotated[Path, typer.Option(help="The study to write; it must be new.", metavar="STUDY.toml")] = Path(
        "study.toml"
    ),
    fingerprint: Annotated[
        Path | None,
        typer.Option(help="Write the fingerprint of every site in DIR here, and no study.", metavar="FILE.json"),
    ] = None,
    method: Annotated[str, typer.Option(help="The method; by default one that suits the federation.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Of training.")] = 100,
    memory: Annotated[float, typer.Option(min=0.5, help="Gigabytes that a training batch may take.")] = 8.0,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that read; by default one per core if there is much to read.")
    ] = None,
) -> None:
    """Write a study planned from the data of all sites: spacing, patch, network, batch, with the reasons as comments.

    A hospital writes its fingerprint, which holds medians and counts only; the fingerprints of all make the plan.
    Example: consilium plan data/prostate --to study.toml
    """
    from consilium.cli.progress import counting
    from consilium.data.fingerprint import fingerprints, read_fingerprints
    from consilium.describe import find
    from consilium.first_study import suggest_for
    from consilium.planning import plan as planned
    from consilium.planning import write_plan

    folders = [path for path in sources if path.is_dir()]
    if len(folders) > 1 or (folders and len(sources) > 1):
        raise StudyError("name one federation's folder, or the files of fingerprints.")
    if fingerprint is not None and not folders:
        raise StudyError("--fingerprint needs the folder of a federation, which may hold one site.")
    if folders:
        with counting("reading cases") as progress:
            found = fingerprints(folders[0], workers, progress)
    else:
        found = [one for path in sources for one in read_fingerprints(path)]
    if fingerprint is not None:
        from consilium.files import write_json

        write_json({"fingerprints": [one.to_json() for one in found]}, fingerprint, durable=False)
        typer.echo(str(fingerprint))
        return
    name = find(method) if method else suggest_for(found[0].task, found[0].labels, [one.annotated for one in found])
    lines = planned(found, name, rounds, memory)
    for line in lines:
        typer.echo(f"[{line.section}] {line.key} = {line.value}: {line.why}", err=True)
    typer.echo(str(write_plan(found, lines, folders[0].resolve() if folders else None, to)))


def cache(
    folder: Annotated[
        Path | None,
        typer.Argument(help="With --study: a federation's folder, or one site's own.", metavar="[DIR]"),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(help="Prepare the cases for this study, before it is run.", metavar="STUDY.toml"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of preparing processes; by default one per core.")
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what is listed; it is made again when needed.")
    ] = False,
    older: Annotated[float, typer.Option(min=0, help="Only what was not used for so many days.", metavar="DAYS")] = 0.0,
    site: Annotated[str | None, typer.Option(help="Only of sites of this name.", metavar="NAME")] = None,
    as_json: Json = False,
) -> None:
    """List what is kept between commands (preprocessed cases, what `check` saw), remove it, or prepare it.

    Preparing that was stopped continues.
    Example: consilium cache --clean --older 30
    """
    from consilium.data.cache_listing import cache_entries, clean_cache
    from consilium.data.cache_place import cache_root

    if study is not None:
        _prepare(study, folder, site, workers)
    elif folder is not None or workers is not None:
        raise StudyError("preparing cases needs --study STUDY.toml: it says how they are preprocessed.")
    found = [one for one in cache_entries() if one.days >= older and site in (None, one.site)]
    freed = clean_cache(found) if clean else 0
    if as_json:
        rows = [
            {"kind": e.kind, "site": e.site, "path": str(e.path), "bytes": e.size, "days": round(e.days, 2)}
            for e in found
        ]
        typer.echo(json.dumps({"cache": str(cache_root()), "entries": rows, "freed": freed}))
        return
    for entry in found:
        typer.echo(f"{entry.size / 1e6:10.1f} MB  {entry.days:6.1f} days  {entry.kind:7}{entry.site}")
    total = sum(entry.size for entry in found) / 1e6
    done = f"removed {freed / 1e6:.1f} MB from" if clean else f"{total:.1f} MB in"
    typer.echo(f"{done} {cache_root()}")


def _prepare(study: Path, folder: Path | None, only: str | None, workers: int | None) -> None:
    """The arrays of every site of a study, or of one; case by case on all cores."""
    from consilium.cli.progress import counting, kept
    from consilium.data.site_folder import read_federation, read_own_site
    from consilium.machine import default_workers
    from consilium.site_opening import open_arrays
    from consilium.study_reading import load_study

    told = load_study(study)
    place = folder if folder is not None else Path(told.data.federation)
    if (place / "federation.toml").exists() or not (place / "site.toml").exists():
        federation = read_federation(place)
    else:
        facts = told.facts
        federation = read_own_site(place, facts.task, facts.labels, facts.dimensions, facts.channels, facts.contains)
    for name in sorted(federation.sites):
        if only in (None, name):
            with kept("the same command", "Cases that are done"), counting(f"preparing {name}") as progress:
                arrays = open_arrays(told, federation, name, workers or default_workers(), progress)
            typer.echo(f"{name}: {counted(len(arrays), 'case')} {are(len(arrays))} ready", err=True)


def add_to(app: typer.Typer) -> None:
    for command in (phantom, partition, plan, cache):
        app.command(rich_help_panel="Data")(command)
