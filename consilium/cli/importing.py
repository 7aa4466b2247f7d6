"""The command `import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.data import say_sites, split_shares
from consilium.errors import StudyError

_FOLDER = "Your own folder (import folder, bids)"
_PAPER = "Sources of a paper's federation"


def import_(
    name: Annotated[str, typer.Argument(help="folder, nnunet, bids, or a published dataset: docs/importing.md.")],
    source: Annotated[
        list[Path] | None, typer.Argument(help="Its files as published, or the folder they are in.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="The federation's folder; it must be new or empty.", metavar="DIR")
    ] = None,
    site: Annotated[str | None, typer.Option(help="The site's name; by default the dataset's.", metavar="NAME")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw of splits, by patient.")] = 0,
    split: Annotated[
        str | None, typer.Option(help="Shares of train,valid,test to draw, or `published`; by default the paper's.")
    ] = None,
    rater: Annotated[
        str, typer.Option(help="Where several people drew: one of them, or what most of them drew.")
    ] = "majority",
    crop: Annotated[str | None, typer.Option(help="Cut pictures around this label, for instance disc.")] = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Leave images where they are; site.toml names their root.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Leave doubtful cases out instead of stopping.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Published datasets: also the cases that the paper leaves out.")
    ] = False,
    images: Annotated[
        str | None,
        typer.Option(
            help="Pattern, such as 'images/{patient}_{eye}.png'; of bids the suffix, such as T1w.",
            rich_help_panel=_FOLDER,
        ),
    ] = None,
    masks: Annotated[
        list[str] | None,
        typer.Option(
            help="Pattern with the same fields; LABEL=PATTERN for a file per label; repeatable.",
            rich_help_panel=_FOLDER,
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(help="CSV with image and mask (or class) instead of patterns.", rich_help_panel=_FOLDER),
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="Names of mask values 1, 2, …: disc,cup.", rich_help_panel=_FOLDER)
    ] = None,
    values: Annotated[
        str | None, typer.Option(help="Stored values and their labels: 255=disc,128=cup.", rich_help_panel=_FOLDER)
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Of soft maps: the label begins at this stored value.", rich_help_panel=_FOLDER)
    ] = None,
    contains: Annotated[
        str | None, typer.Option(help="What lies inside what: disc=cup.", rich_help_panel=_FOLDER)
    ] = None,
    channels: Annotated[
        int | None,
        typer.Option(min=1, help="1 makes grey, 3 colour; by default as the first image.", rich_help_panel=_FOLDER),
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option(
            min=2, max=3, help="2 for pictures, 3 for volumes; by default as the first image.", rich_help_panel=_FOLDER
        ),
    ] = None,
    drishti: Annotated[
        Path | None, typer.Option(help="Drishti-GS1, of fedsm-retina.", metavar="DIR", rich_help_panel=_PAPER)
    ] = None,
    riga: Annotated[
        Path | None, typer.Option(help="RIGA, of fedsm-retina.", metavar="DIR", rich_help_panel=_PAPER)
    ] = None,
    rimone: Annotated[
        Path | None, typer.Option(help="RIM-ONE, of fedsm-retina.", metavar="DIR", rich_help_panel=_PAPER)
    ] = None,
    refuge: Annotated[
        Path | None, typer.Option(help="REFUGE, of fedsm-retina.", metavar="DIR", rich_help_panel=_PAPER)
    ] = None,
    i2cvb: Annotated[
        Path | None, typer.Option(help="I2CVB, of fedsm-prostate.", metavar="DIR", rich_help_panel=_PAPER)
    ] = None,
    msd_prostate: Annotated[
        Path | None, typer.Option(help="MSD Task05, of fedsm-prostate.", metavar="DIR", rich_help_panel=_PAPER)
    ] = None,
    nci_isbi: Annotated[
        Path | None, typer.Option(help="NCI-ISBI 2013, of fedsm-prostate.", metavar="DIR", rich_help_panel=_PAPER)
    ] = None,
    promise12: Annotated[
        Path | None, typer.Option(help="PROMISE12, of fedsm-prostate.", metavar="DIR", rich_help_panel=_PAPER)
    ] = None,
    prostatex: Annotated[
        Path | None, typer.Option(help="PROSTATEx, of fedsm-prostate.", metavar="DIR", rich_help_panel=_PAPER)
    ] = None,
    word: Annotated[
        Path | None, typer.Option(help="WORD, of ufps-abdomen.", metavar="DIR", rich_help_panel=_PAPER)
    ] = None,
    abdomenct1k: Annotated[
        Path | None, typer.Option(help="AbdomenCT-1K, of ufps-abdomen.", metavar="DIR", rich_help_panel=_PAPER)
    ] = None,
    amos: Annotated[
        Path | None, typer.Option(help="AMOS22, of ufps-abdomen.", metavar="DIR", rich_help_panel=_PAPER)
    ] = None,
    btcv: Annotated[
        Path | None, typer.Option(help="BTCV, of ufps-abdomen.", metavar="DIR", rich_help_panel=_PAPER)
    ] = None,
) -> None:
    """Turn a folder of images and masks, or a published dataset, into site folders; nothing is written on doubt.

    Example: consilium import folder scans --images images/{case}.png --masks masks/{case}.png --labels disc --to data/mine
    """  # noqa: E501
    from consilium.cli.progress import counting, kept
    from consilium.data.importers import STACKS, import_dataset, import_federation, import_found
    from consilium.data.importers.federations import FEDERATIONS
    from consilium.data.importers.options import ImportOptions
    from consilium.data.importers.writing import Writing

    if to is None:
        raise StudyError("--to DIR is missing: say where the federation is to be written.")
    folders = {
        "drishti": drishti, "riga": riga, "rimone": rimone, "refuge": refuge, "i2cvb": i2cvb,
        "msd-prostate": msd_prostate, "nci-isbi": nci_isbi, "promise12": promise12, "prostatex": prostatex,
        "word": word, "abdomenct1k": abdomenct1k, "amos": amos, "btcv": btcv,
    }  # fmt: skip
    given = {member: folder for member, folder in folders.items() if folder is not None}
    if name in FEDERATIONS and source:
        raise StudyError(f"`import {name}` takes its sources by name; write --{FEDERATIONS[name][0]} {source[0]}.")
    if given and name not in FEDERATIONS:
        raise StudyError(f"--{next(iter(given))} is for {', '.join(FEDERATIONS)}; give the folder after the name.")
    options = ImportOptions(
        images or "", tuple(masks or ()), table, _words(labels), _words(values), threshold, channels, dimensions,
        _words(contains), site or "", every,
    )  # fmt: skip
    how = Writing(
        seed,
        "published" if split == "published" else split_shares(split) if split else "",
        rater,
        reference,
        yes,
        crop or "",
    )
    if name in STACKS:
        options.refuse_others(name, ("site",))
        if how != Writing(seed, yes=yes):
            raise StudyError(
                f"--split, --rater, --crop and --reference do not go with `import {name}`; leave them out."
            )
        federation = import_dataset(name, _sources(name, source), to, site, seed)
    else:
        with kept("the same command", "Cases that are done"), counting("cases") as progress:
            if name in FEDERATIONS:
                imported = import_federation(name, given, to, options, how, progress)
            else:
                imported = import_found(name, _sources(name, source), to, options, how, progress)
        for line in imported.said:
            typer.echo(line, err=True)
        federation = imported.federation
    say_sites(federation)
    typer.echo(str(to))


def _sources(name: str, given: list[Path] | None) -> list[Path]:
    if not given:
        raise StudyError(f"`import {name}` needs the files of the dataset, or the folder they are in.")
    return given


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()


def add_to(app: typer.Typer) -> None:
    app.command("import", rich_help_panel="Data")(import_)
