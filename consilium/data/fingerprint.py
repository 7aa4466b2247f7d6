"""What a plan needs to know of a site: medians and counts over its training cases, and no case's name.

A hospital makes its fingerprint with `consilium plan DIR --fingerprint FILE`, looks at it, and sends it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from consilium.data.case_facts import CaseFacts
from consilium.data.gathering import Progress, look_at_all
from consilium.data.orientation import axes_between, reordered
from consilium.data.site_folder import Federation, read_federation
from consilium.errors import DataError
from consilium.wording import command

ORIENTATION = "RAS"  # of a study's volumes, unless it says another


@dataclass(frozen=True)
class SiteFingerprint:
    """One site's training cases in numbers. Axes are (row, column), or (z, y, x) in the study's orientation."""

    site: str
    task: str
    labels: tuple[str, ...]
    dimensions: int
    channels: int
    contains: dict[str, tuple[str, ...]]
    annotated: tuple[str, ...]
    cases: int  # for training
    size: tuple[float, ...]  # medians, voxels
    spacing: tuple[float, ...]  # medians, mm; () where files do not say
    finest: tuple[float, ...]  # 10th percentiles of the spacing, mm
    types: tuple[str, ...]  # of the stored numbers
    lowest: float  # median of the lowest stored values
    bright: float  # median of the values that 3 % of an image exceed
    inside: tuple[float, ...]  # medians of 0.5 %, 50 %, 99.5 %, mean and deviation where a label is; () if nowhere
    shares: dict[str, float]  # label → median share of an image, or share of the cases that are of a class

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def fingerprints(folder: Path, workers: int | None = None, progress: Progress | None = None) -> list[SiteFingerprint]:
    """The fingerprint of every site of a federation that has training cases; broken cases are refused."""
    federation = read_federation(folder)
    looks = look_at_all(federation, workers, progress)
    if faults := [fault for look in looks for fault in look.faults]:
        many = f"{len(faults)} faults" if len(faults) > 1 else "a fault"
        raise DataError(f"{folder} has {many}, such as {faults[0]} Run {command('check', folder)} first.")
    found = []
    for name in federation.sites:
        own = [look for look in looks if look.site == name]
        # a table without splits yet: all of them will be drawn from
        trained = [look for look in own if look.case.split == "train"] or [look for look in own if not look.case.split]
        classes = Counter(str(look.case.label) for look in trained)
        facts = [look.facts for look in trained if look.facts is not None]
        if facts:
            found.append(_fingerprint(federation, name, facts, classes))
    if not found:
        raise DataError(f"{folder} has no training case; draw splits with {command('check', folder, '--split')}.")
    return found


def _fingerprint(
    federation: Federation, site: str, facts: Sequence[CaseFacts], classes: Counter[str]
) -> SiteFingerprint:
    turns = [axes_between(one.orientation, ORIENTATION) if federation.dimensions == 3 else () for one in facts]
    sizes = [reordered(one.shape, axes) for one, axes in zip(facts, turns)]
    spacings = [reordered(one.spacing, axes) for one, axes in zip(facts, turns) if one.sized]
    inside = [one.inside for one in facts if one.inside]
    if federation.task == "classification":
        shares = {label: classes[label] / len(facts) for label in federation.labels}
    else:
        shares = {}
        for value, label in enumerate(federation.labels, start=1):
            found = [one.labels[value].voxels / one.size for one in facts if value in one.labels]
            shares |= {label: _plain(np.median(found))} if found else {}
    known = len(spacings) == len(facts)
    return SiteFingerprint(
        site=site,
        task=federation.task,
        labels=federation.labels,
        dimensions=federation.dimensions,
        channels=federation.channels,
        contains=dict(federation.contains),
        annotated=federation.sites[site].annotated,
        cases=len(facts),
        size=_medians(sizes),
        spacing=_medians(spacings) if known else (),
        finest=tuple(_plain(v) for v in np.percentile(spacings, 10, axis=0)) if known else (),
        types=tuple(sorted({one.type for one in facts})),
        lowest=_plain(np.median([one.lowest for one in facts])),
        bright=_plain(np.median([one.quantiles[-2] for one in facts])),
        inside=_medians(inside) if inside else (),
        shares=shares,
    )


def _medians(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(_plain(value) for value in np.median(rows, axis=0))


def _plain(value: Any) -> float:
    return float(f"{float(value):.5g}")


def read_fingerprints(path: Path) -> list[SiteFingerprint]:
    """Those in a file that `--fingerprint` wrote."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["fingerprints"]
        found = [_read(entry) for entry in entries]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} holds no fingerprints ({error}); make it with `consilium plan DIR --fingerprint`."
        ) from error
    return found


def _read(entry: dict[str, Any]) -> SiteFingerprint:
    values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in entry.items()}
    values["contains"] = {str(outer): tuple(inner) for outer, inner in entry["contains"].items()}
    made = SiteFingerprint(**values)
    axes = int(made.dimensions)
    numbers = (*made.size, *made.spacing, *made.finest, *made.inside, made.lowest, made.bright)
    if axes not in (2, 3) or len(made.size) != axes or len(made.spacing) not in (0, axes) or made.cases < 1:
        raise ValueError("its sizes do not fit its dimensions")
    if not all(isinstance(value, int | float) and np.isfinite(value) for value in numbers):
        raise ValueError("a figure is no number")
    return made
