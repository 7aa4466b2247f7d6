"""A first study for a federation: settings from its tables and a few of its images, with a comment on every line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from consilium.data.images import read_image
from consilium.data.site_folder import Federation, read_federation
from consilium.describe import find
from consilium.errors import DataError, StudyError
from consilium.fields import to_toml
from consilium.files import write_text
from consilium.study_reading import load_study
from consilium.validation import check_size
from consilium.wording import command, counted

SAMPLED = 3  # training images per site that are opened
LARGEST = {2: 256, 3: 96}  # pixels or voxels of the longest side in training
HOUNSFIELD = -500.0  # volumes with values below this are taken for CT
ROUNDS = 100


@dataclass(frozen=True)
class Sample:
    """Facts of a few training images."""

    size: tuple[int, ...]  # the median of each axis
    types: frozenset[str]  # of the stored numbers
    lowest: float
    smallest_site: int  # training cases


def suggest_method(federation: Federation) -> str:
    """A method for a federation, by its task, its number of sites and their labels."""
    guests = _guests(federation)
    drawn = [site.annotated for name, site in federation.sites.items() if name not in guests]
    return suggest_for(federation.task, federation.labels, drawn)


def suggest_for(task: str, labels: Sequence[str], annotated: Sequence[Sequence[str]]) -> str:
    """A method for sites that annotate these labels."""
    if len(annotated) < 2:
        return "local"
    if task == "classification":
        return "apple"
    return "fedsm" if all(set(drawn) == set(labels) for drawn in annotated) else "ufps"


def write_first_study(folder: Path, to: Path, method: str = "", rounds: int = ROUNDS) -> Path:
    """Write a study that runs on the federation in `folder`; an existing file is not overwritten.

    An empty `method` takes the one that `suggest_method` names. Returns the file's path.
    """
    if to.exists():
        raise StudyError(f"{to} exists already; choose another file with --to.")
    federation = read_federation(folder)
    name = find(method) if method else suggest_method(federation)
    text = study_text(federation, _sample(federation), folder, name, rounds)
    to.parent.mkdir(parents=True, exist_ok=True)
    write_text(text, to)
    try:
        check_size(load_study(to))
    except StudyError:
        to.unlink()
        raise
    return to


def _sample(federation: Federation) -> Sample:
    _check_splits(federation)
    by_site = [[case for case in site.cases if case.split == "train"] for site in federation.sites.values()]
    training = [cases for cases in by_site if cases]
    images = [
        read_image(case.image, federation.dimensions, federation.channels).array
        for cases in training
        for case in cases[:SAMPLED]
    ]
    sizes = np.median([image.shape[1:] for image in images], axis=0)
    return Sample(
        tuple(int(side) for side in sizes),
        frozenset(str(image.dtype) for image in images),
        float(min(image.min() for image in images)),
        min(map(len, training)),
    )


def _check_splits(federation: Federation) -> None:
    remedy = f"draw the splits with {command('check', federation.folder, '--split', '0.6,0.2,0.2')}"
    for site in federation.sites.values():
        splits = {case.split for case in site.cases}
        if "" in splits or not splits:
            raise DataError(f"site '{site.name}' has cases without a split; {remedy}.")
        if "train" in splits and "valid" not in splits:
            raise DataError(f"site '{site.name}' has no validation cases; {remedy}.")
    if len(federation.sites) == len(_guests(federation)):
        raise DataError(f"no site of {federation.folder} has training cases; {remedy}.")


def _guests(federation: Federation) -> list[str]:
    """Sites without training cases: they are scored as hospitals outside the federation."""
    sites = federation.sites.values()
    return [site.name for site in sites if not any(case.split == "train" for case in site.cases)]


# ------------------------------------------------------------------------------------------------- settings

Lines = list[tuple[str, Any, str]]  # key, value, what it means


def study_text(federation: Federation, sample: Sample, folder: Path, method: str, rounds: int) -> str:
    """The study as TOML, with a comment on every line."""
    size, guests = training_size(sample.size, federation.dimensions), _guests(federation)
    sections: Mapping[str, Lines] = {
        "study": [
            ("name", f"{folder.resolve().name}-{method}", "first part of the run folder's name"),
            ("rounds", rounds, "how often the sites train and the server merges"),
            ("score_every", max(1, rounds // 20), "rounds between two scores on validation and test cases"),
            ("seed", 0, "repeat the run with other seeds before you trust a difference"),
            *(
                [("leave_out", guests, "no training cases: scored as hospitals outside the federation")]
                if guests
                else []
            ),
        ],
        "data": [("federation", folder.as_posix(), "folder with federation.toml and one folder per site")],
        "preprocess": _preprocess(federation, sample, size),
        "task": _task(federation, size),
        "local": _local(federation, sample, method),
        "method": [("name", method, f"`consilium methods {method}` explains it; `consilium methods` lists all")],
    }
    head = [
        f"# {_about(federation)}.",
        "# `consilium init` wrote this file. Train with `consilium run`; docs/studies.md lists every key.",
    ]
    return "\n".join([*head, *(line for name, lines in sections.items() for line in _section(name, lines))]) + "\n"


def _about(federation: Federation) -> str:
    cases = sum(len(site.cases) for site in federation.sites.values())
    return (
        f"{federation.task.capitalize()} of {federation.dimensions}-D images ({', '.join(federation.labels)}): "
        f"{counted(len(federation.sites), 'site')}, {counted(cases, 'case')}"
    )


def _section(name: str, lines: Lines) -> list[str]:
    written = [f"{key} = {to_toml(value)}" for key, value, _ in lines]
    width = max(map(len, written))
    return ["", f"[{name}]", *(f"{line.ljust(width)}  # {why}" for line, (_, _, why) in zip(written, lines))]


def training_size(size: Sequence[int], dimensions: int) -> tuple[int, ...]:
    """The size to train in: the median, scaled down to LARGEST, each side a multiple of 16 (small ones of 4)."""
    shrink = min(1.0, LARGEST[dimensions] / max(size))
    sides = (side * shrink for side in size)
    return tuple(max(4, step * round(side / step)) for side in sides for step in (16 if side >= 32 else 4,))


def _preprocess(federation: Federation, sample: Sample, size: tuple[int, ...]) -> Lines:
    axes = "row, column" if federation.dimensions == 2 else "z, y, x"
    lines: Lines = [("size", list(size), f"every image is resized to this ({axes}); larger is slower")]
    if federation.dimensions == 3 and sample.lowest < HOUNSFIELD:
        return [*lines, ("window", [-200.0, 300.0], "CT in Hounsfield units: soft tissue; lung and bone need others")]
    if sample.types == {"uint8"}:
        return [*lines, ("normalise", "unit", "8-bit values are divided by 255")]
    return [*lines, ("percentiles", [0.5, 99.5], "each image is clipped to these percentiles and scaled to 0…1")]


def _task(federation: Federation, size: tuple[int, ...]) -> Lines:
    if federation.task == "classification":
        small = federation.dimensions == 2 and max(size) <= 64
        return [
            ("network", "cnn" if small else "vgg-small", "cnn for small pictures, vgg-small or vgg11 for larger ones")
        ]
    widths = [8, 16, 32, 64]
    if min(size) >= 128:
        widths = [16, 32, 64, 128, 256]
    elif min(size) < 16:
        widths = [8, 16]
    elif min(size) < 32:
        widths = [8, 16, 32]
    return [
        ("network", f"unet{federation.dimensions}d", "a U-Net; plain-unet and your own networks are possible too"),
        ("widths", widths, "channels per level; each level halves the image"),
        ("loss", "dice+ce", "Dice loss and cross-entropy"),
        ("augment", ["rotate", "scale", "brightness"], "random changes; add flip if sides do not matter"),
    ]  # fmt: skip


def _local(federation: Federation, sample: Sample, method: str) -> Lines:
    batch = min(8 if federation.dimensions == 2 else 2, sample.smallest_site)
    lines: Lines = [
        ("optimizer", "adam", "or adamw, sgd"),
        ("lr", 0.001, "learning rate; lower it if the loss jumps"),
        ("epochs", 1, "passes over a site's training cases per round"),
        ("batch_size", batch, "cases per training step; lower it if memory runs out"),
    ]
    if method != "scaffold":
        return lines
    plain = [
        ("optimizer", "sgd", "SCAFFOLD is defined for plain SGD"),
        ("momentum", 0.0, "plain: without momentum"),
        ("lr", 0.05, "learning rate; lower it if the loss jumps"),
    ]
    return [*plain, *lines[2:]]
