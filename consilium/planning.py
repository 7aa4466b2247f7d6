"""A study from the fingerprints of all sites: every value with its reason as a comment.

The rules follow nnU-Net's where it has one: spacing from medians, the finest tenth where slices are thick, a patch as
large as the memory allows, as many levels as the patch has halvings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from consilium.data.fingerprint import ORIENTATION, SiteFingerprint
from consilium.errors import DataError
from consilium.fields import to_toml
from consilium.files import write_text
from consilium.local_training import Local
from consilium.methods import METHODS
from consilium.study_reading import load_study
from consilium.validation import check_size
from consilium.wording import counted

THICK = 3.0  # slices so many times thicker than pixels are wide: their axis is planned by itself
SMALLEST = 4  # voxels of a feature map's side at the lowest level
LEVELS = 6  # at most
WIDEST = {2: 512, 3: 320}
PATCH_VOXELS = 112**3  # for 8 GB of memory, batch 2, 32 channels on the first level
PIXELS = 12 * 512 * 512  # of a batch of pictures, for 8 GB
LARGEST_PICTURE = 512
CT_AIR = -500.0
PARTED = ("ufps", "fedasam-pl", "multi-head", "multi-encoder", "multi-decoder")  # they know a U-Net's parts
FEW = 50  # training cases of all sites


@dataclass(frozen=True)
class PlanLine:
    """One key of a study, and why it has this value."""

    section: str
    key: str
    value: Any
    why: str


def plan(sites: Sequence[SiteFingerprint], method: str, rounds: int, memory: float = 8.0) -> list[PlanLine]:
    """The lines of a study, in order.

    Args:
        sites: the fingerprints of all sites.
        method: the federated method.
        memory: gigabytes that a batch may take.
    """
    _refuse_unlike(sites)
    one = sites[0]
    lines = [
        PlanLine("study", "rounds", rounds, "training stops here; the best round on validation cases is kept"),
        PlanLine("method", "name", method, "`consilium methods` lists the others"),
    ]
    if one.dimensions == 3:
        lines.append(PlanLine("preprocess", "orientation", ORIENTATION, "all volumes are brought to it"))
    shape, spacing = _geometry(sites, lines)
    shape = _patch(one, shape, spacing, memory, lines)
    _intensities(sites, lines)
    _network(one, shape, spacing, method, lines)
    _augmentation(sites, lines)
    _batch(sites, shape, memory, lines)
    return lines


def write_plan(sites: Sequence[SiteFingerprint], lines: Sequence[PlanLine], federation: Path | None, to: Path) -> Path:
    """Write the study; without a federation it holds [facts], so that it can be read where no data are."""
    if to.exists():
        raise DataError(f"{to} exists already; name another file with --to.")
    one = sites[0]
    cases = counted(sum(site.cases for site in sites), "training case")
    head = [
        f"# Planned from {cases} of {counted(len(sites), 'site')}: "
        + ", ".join(f"{site.site} {site.cases}" for site in sites),
        "# Every value has its reason behind it. Change what you know better.",
    ]
    tables: dict[str, list[str]] = {
        section: [] for section in ("study", "data", "preprocess", "task", "local", "method")
    }
    for line in lines:
        tables[line.section].append(f"{line.key} = {to_toml(line.value)}  # {line.why}")
    if federation is not None:
        tables["data"].append(f"federation = {to_toml(str(federation))}")
    else:
        tables["local"].append(f"optimizer_state = {to_toml(_state(lines))}  # of the optimisers, from round to round")
        tables["facts"] = [
            f"{key} = {to_toml(value)}"
            for key, value in (
                ("task", one.task), ("labels", one.labels), ("dimensions", one.dimensions),
                ("channels", one.channels), ("contains", one.contains),
            )
        ]  # fmt: skip
    parts = [f"[{section}]\n" + "\n".join(texts) for section, texts in tables.items() if texts]
    to.parent.mkdir(parents=True, exist_ok=True)
    write_text("\n".join(head) + "\n\n" + "\n\n".join(parts) + "\n", to)
    try:
        check_size(load_study(to))
    except BaseException:
        to.unlink()
        raise
    return to


def _state(lines: Sequence[PlanLine]) -> str:
    """The optimisers' state, which a study with [facts] must say: the method's, where it fixes one."""
    name = next(line.value for line in lines if (line.section, line.key) == ("method", "name"))
    kind = METHODS.get(name)
    return (kind.optimizer_state if kind is not None else "") or Local.optimizer_state


def _refuse_unlike(sites: Sequence[SiteFingerprint]) -> None:
    first = sites[0]
    for site in sites[1:]:
        for key in ("task", "labels", "dimensions", "channels"):
            ours, theirs = getattr(first, key), getattr(site, key)
            if ours != theirs:
                raise DataError(
                    f"site {first.site!r} has {key} = {ours}, {site.site!r} has {theirs}; plan one task at a time."
                )
    names = [site.site for site in sites]
    if len(set(names)) < len(names):
        raise DataError("a site is named twice among the fingerprints; give each file once.")


# ---------------------------------------------------------------------------------------------- geometry


def _geometry(sites: Sequence[SiteFingerprint], lines: list[PlanLine]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The median image after resampling, and its spacing (() where it is not known)."""
    size = _over(sites, lambda site: site.size)
    if not all(site.spacing for site in sites) or sites[0].dimensions == 2:
        return tuple(round(side) for side in size), ()
    spacing = _over(sites, lambda site: site.spacing)
    why = "the median of all sites, so that an organ has the same size in voxels everywhere"
    coarse = int(np.argmax(spacing))
    others = [step for axis, step in enumerate(spacing) if axis != coarse]
    if spacing[coarse] > THICK * max(others):
        finest = _over(sites, lambda site: site.finest)[coarse]
        fine = max(finest, max(others))
        spacing = tuple(fine if axis == coarse else step for axis, step in enumerate(spacing))
        why = "medians of all sites; slices are thick, so along them the finest tenth: it loses least"
    apart = max(max(site.spacing[a] for site in sites) / min(site.spacing[a] for site in sites) for a in range(3))
    spacing = tuple(float(f"{step:.3g}") for step in spacing)
    if apart > 1.01 or any(site.finest != site.spacing for site in sites):
        lines.append(PlanLine("preprocess", "spacing", list(spacing), f"{why}; sites differ up to {apart:.2f} times"))
        middle = _over(sites, lambda site: [n * s for n, s in zip(site.size, site.spacing)])
        size = tuple(length / step for length, step in zip(middle, spacing))
    return tuple(max(1, round(side)) for side in size), spacing


def _patch(
    one: SiteFingerprint, shape: tuple[int, ...], spacing: tuple[float, ...], memory: float, lines: list[PlanLine]
) -> tuple[int, ...]:
    """What the network sees: pictures of one size, or patches of volumes."""
    if one.dimensions == 2 or one.task == "classification":
        most = LARGEST_PICTURE if one.dimensions == 2 else 96
        scale = min(1.0, most / max(shape))
        grain = 16 if min(shape) * scale >= 64 else 4
        size = tuple(max(grain, round(side * scale / grain) * grain) for side in shape)
        told = "the median of all sites" + (f", shrunk to {most}" if scale < 1 else "")
        lines.append(
            PlanLine("preprocess", "size", list(size), f"{told}, in steps of {grain} so that it can be halved")
        )
        return size
    patch = [min(side, 512) for side in shape]
    limit = PATCH_VOXELS * memory / 8
    steps = spacing or (1.0,) * 3
    while math.prod(patch) > limit:  # the longest side in mm gives way, so that the patch becomes a cube of tissue
        axis = max((a for a in range(3) if patch[a] > 16), key=lambda a: patch[a] * steps[a])
        patch[axis] -= max(1, patch[axis] // 16)
    grains = [1 << max(0, min(4, int(math.log2(max(1, side) / SMALLEST)))) for side in patch]
    size = tuple(max(grain, side // grain * grain) for side, grain in zip(patch, grains))
    part = math.prod(size) / math.prod(shape)
    why = f"as much as {memory:g} GB hold" if math.prod(shape) > limit else "in sides that can be halved"
    told = f"{100 * min(1.0, part):.0f} % of the median volume {'×'.join(map(str, shape))}: {why}"
    lines.append(PlanLine("task", "patch", list(size), told))
    return size


def _over(sites: Sequence[SiteFingerprint], what: Callable[[SiteFingerprint], Sequence[float]]) -> tuple[float, ...]:
    """The median over all cases, each site's cases at the site's median."""
    columns = zip(*(what(site) for site in sites))
    counts = [site.cases for site in sites]
    return tuple(_weighted_median(list(column), counts) for column in columns)


def _weighted_median(values: Sequence[float], counts: Sequence[int]) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(np.asarray(counts)[order])
    return float(values[order[int(np.searchsorted(reached, reached[-1] / 2))]])


# ---------------------------------------------------------------------------------------------- the rest


def _intensities(sites: Sequence[SiteFingerprint], lines: list[PlanLine]) -> None:
    types = sorted({name for site in sites for name in site.types})
    if sites[0].dimensions == 3 and all(site.lowest < CT_AIR for site in sites) and all(site.inside for site in sites):
        low, _, high, _, _ = _over(sites, lambda site: site.inside)
        window = [round(low), round(high)]
        told = "CT: the range of 99 % of the voxels inside the labels, in HU, the same for all sites"
        lines += [
            PlanLine("preprocess", "window", window, told),
            PlanLine("preprocess", "normalise", "unit", "the window becomes 0 to 1"),
        ]
    elif types == ["uint8"]:
        lines.append(PlanLine("preprocess", "normalise", "unit", "all sites store bytes: 0 to 255 becomes 0 to 1"))
    else:
        told = f"stored values have no common unit ({', '.join(types)}): a case's outermost half per cents are cut off"
        lines += [
            PlanLine("preprocess", "percentiles", [0.5, 99.5], told),
            PlanLine(
                "preprocess", "normalise", "zscore", "every case to mean 0 and deviation 1, so that scanners agree"
            ),
        ]


def _network(
    one: SiteFingerprint, shape: Sequence[int], spacing: Sequence[float], method: str, lines: list[PlanLine]
) -> None:
    if one.task == "classification":
        small = min(shape) < 48 and one.dimensions == 2
        lines.append(
            PlanLine("task", "network", "cnn", "small pictures need no deep network")
            if small
            else PlanLine(
                "task", "network", "resnet", "ResNet-18, with group normalisation below: batches of sites differ"
            )
        )
        if not small:
            lines.append(PlanLine("task", "norm", "group", "batch statistics do not mix well between sites"))
        return
    parted = method in PARTED
    halvings = max(1, min(LEVELS - 1, int(math.log2(min(sorted(shape)[-2:]) / SMALLEST))))
    if parted:
        widths = [min(WIDEST[3], 32 << i) for i in range(halvings + 1)]
        lines.append(PlanLine("task", "network", "plain-unet", f"{method} averages encoder and decoder by themselves"))
    elif one.dimensions == 2:
        widths = [min(WIDEST[2], 16 << i) for i in range(halvings + 1)]
        lines.append(PlanLine("task", "network", "unet2d", "the U-Net of the FedSM paper"))
    else:
        widths = [min(WIDEST[3], 32 << i) for i in range(halvings + 1)]
        lines.append(PlanLine("task", "network", "dynunet", "nnU-Net's U-Net, which can keep thick slices apart"))
    lowest = "×".join(str(max(1, side >> halvings)) for side in shape)
    lines.append(PlanLine("task", "widths", widths, f"{halvings} halvings: {lowest} at the lowest level"))
    if one.dimensions == 3 and not parted:
        thick = spacing[0] / min(spacing[1:]) if spacing else 1.0
        flat = min(halvings, max(0, round(math.log2(thick)), halvings - int(math.log2(max(1, shape[0]) / 2))))
        if flat:
            told = (
                f"slices are {thick:.1f} times as thick as pixels are wide, or few"
                if spacing
                else "there are few slices"
            )
            lines.append(PlanLine("task", "flat_levels", flat, told))
    lines.append(PlanLine("task", "loss", "dice+ce", "Dice alone learns slowly where a label is small"))


def _augmentation(sites: Sequence[SiteFingerprint], lines: list[PlanLine]) -> None:
    cases = sum(site.cases for site in sites)
    strong = "*1.5" if cases < FEW else ""
    sided = [label for label in sites[0].labels if any(word in label.lower() for word in ("left", "right"))]
    names = [] if sided or sites[0].task == "classification" else ["flip"]
    brights = [site.bright for site in sites if site.bright > 0]
    apart = max(brights) / min(brights) if len(brights) == len(sites) and brights else 1.0
    names += [f"rotate{strong}", f"scale{strong}", "brightness*2" if apart > 2 else "brightness", "noise"]
    reasons = [counted(cases, "training case") + (", so strongly" if strong else "")]
    if sided:
        reasons.append(f"no flips, since {sided[0]!r} has a side")
    elif sites[0].task == "classification":
        reasons.append("no flips, since a class may have a side")
    if apart > 2:
        reasons.append(f"bright values of sites differ {apart:.1f} times")
    lines.append(PlanLine("task", "augment", names, "; ".join(reasons)))


def _batch(sites: Sequence[SiteFingerprint], shape: Sequence[int], memory: float, lines: list[PlanLine]) -> None:
    """What the memory holds, but of volumes no more than a twentieth of all training voxels, as in nnU-Net."""
    smallest = min(site.cases for site in sites)
    room = (PIXELS if sites[0].dimensions == 2 else 2 * PATCH_VOXELS) * memory / 8 / math.prod(shape)
    least = f"the smallest site has {counted(smallest, 'training case')}"
    limits = {"a batch has at most 32 cases": 32, least: smallest}
    limits[f"what {memory:g} GB hold"] = max(1 if sites[0].dimensions == 2 else 2, int(room))
    if sites[0].dimensions == 3 and sites[0].task == "segmentation":
        voxels = sum(site.cases * math.prod(site.size) for site in sites)
        limits["a twentieth of all training voxels"] = max(2, int(voxels / 20 / math.prod(shape)))
    told = min(limits, key=lambda why: limits[why])
    lines.append(PlanLine("local", "batch_size", max(1, limits[told]), told))
