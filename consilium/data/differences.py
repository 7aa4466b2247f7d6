"""Differences between cases and sites: sizes, spacings, orientations, types and ranges of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np

from consilium.data.preprocess import rounded, shape_text
from consilium.data.seen import (
    DataFinding,
    SeenCase,
    SeenFederation,
    of_site,
    some_cases,
)
from consilium.wording import counted

CASE_TIMES = 10.0  # the bright value that nine tenths of a site's cases stay below, against that of one tenth
RANGE_TIMES = 4.0  # by which the bright values of two sites differ
SPACING_TIMES = 1.5
AIR = -500.0  # HU: the darkest value of a CT lies below
DEEPEST = -4096.0  # HU: no scanner stores less


def of_geometry(seen: SeenFederation) -> Iterator[DataFinding]:
    """Sizes, spacings and orientations that differ."""
    cases = seen.cases
    shapes = sorted({one.facts.shape for one in cases})
    if len(shapes) > 1:
        smallest, largest = (shape_text(pick) for pick in (np.min(shapes, axis=0), np.max(shapes, axis=0)))
        yield _between(
            "note", "sizes", f"images have {len(shapes)} sizes, from {smallest} to {largest}",
            "Images of different sizes cannot be in one batch.", "A study may set [preprocess] size or [task] patch.",
        )  # fmt: skip
    spacings = sorted({rounded(one.facts.spacing) for one in cases})
    if len(spacings) > 1:
        some = ", ".join(shape_text(spacing) for spacing in spacings[:4])
        middles = {site: _middle([one.facts.spacing for one in seen.of(site)]) for site in _sites(cases)}
        apart = _apart(middles)
        told = "; ".join(f"{site} {shape_text(spacing)}" for site, spacing in middles.items())
        yield _between(
            "warning" if apart > SPACING_TIMES else "note", "spacings",
            f"images have {len(spacings)} spacings ({some} mm, …){f'; medians: {told}' if len(middles) > 1 else ''}",
            f"The same organ has other sizes in voxels{f', up to {apart:.1f} times' if apart > 1.05 else ''}.",
            "A study may set [preprocess] spacing.",
        )  # fmt: skip
    turns = sorted({one.facts.orientation for one in cases} - {""})
    if len(turns) > 1:
        yield _between(
            "note", "orientations", f"volumes are stored in {len(turns)} orientations ({', '.join(turns)})",
            "A study brings them to one.", "",
        )  # fmt: skip
    unsaid = [one for one in cases if not one.facts.orientation]
    if turns and unsaid:
        yield _between(
            "warning", "orientations",
            f"{counted(len(unsaid), 'volume')} whose file does not say its orientation: {some_cases(unsaid)}",
            "They are used as stored.", "It must be the study's; store them as NIfTI, mha or nrrd.",
        )  # fmt: skip


def of_values(seen: SeenFederation) -> Iterator[DataFinding]:
    """Number types and ranges of intensity that differ between sites; values that cannot be HU."""
    sites = _sites(seen.cases)
    types = {site: tuple(sorted({one.facts.type for one in seen.of(site)})) for site in sites}
    if len({name for found in types.values() for name in found}) > 1:
        told = "; ".join(f"{site} {', '.join(found)}" for site, found in types.items())
        yield _between(
            "note", "number types", f"images are stored as different types of numbers ({told})",
            'normalise = "unit" divides by the type\'s range.', "Set [preprocess] window or percentiles.",
        )  # fmt: skip
    lows = {site: median(one.facts.lowest for one in seen.of(site)) for site in sites}
    if seen.federation.dimensions == 3 and seen.federation.channels == 1 and min(lows.values(), default=0) < AIR:
        yield from _not_hu(seen, lows)
        return
    tops = {site: median(one.facts.quantiles[-2] for one in seen.of(site)) for site in sites}
    if tops and min(tops.values()) > 0 and max(tops.values()) > RANGE_TIMES * min(tops.values()):
        told = "; ".join(f"{site} {top:g}" for site, top in tops.items())
        yield _between(
            "warning", "intensities", f"bright values differ between sites ({told})",
            "Without normalising by case, a site's images look black or white to the network.",
            'Set [preprocess] percentiles = [0.5, 99.5], or normalise = "zscore".',
        )  # fmt: skip
    for site in sites:
        low, high = np.percentile([one.facts.quantiles[-2] for one in seen.of(site)], [10, 90])
        if 0 < low * CASE_TIMES < high:
            yield of_site(
                "warning", "intensities", seen.federation.sites[site],
                f"bright values of the cases of site {site!r} differ {high / low:,.0f} times ({low:g} to {high:g})",
                "Without normalising by case, many of its images look black or white to the network.",
                'Set [preprocess] percentiles = [0.5, 99.5], or normalise = "zscore".',
            )  # fmt: skip


def _not_hu(seen: SeenFederation, lows: Mapping[str, float]) -> Iterator[DataFinding]:
    for one in seen.cases:
        facts = one.facts
        above = facts.lowest >= 0 and facts.highest > 1000 and lows[one.site] > AIR
        if above or facts.lowest < DEEPEST:
            values = f"its values go from {facts.lowest:g} to {facts.highest:g}, which cannot be HU"
            yield seen.about(
                "warning", "not HU", one, values, "A window in HU cuts it elsewhere than in other cases.",
                "Apply the rescale slope and intercept (often -1024); export it again.",
            )  # fmt: skip


def _between(severity: str, kind: str, what: str, effect: str, remedy: str) -> DataFinding:
    return DataFinding(severity, kind, "", "", "", what, effect, remedy)


def _sites(cases: Sequence[SeenCase]) -> list[str]:
    return list(dict.fromkeys(one.site for one in cases))


def _middle(spacings: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return rounded(tuple(float(value) for value in np.median(spacings, axis=0)))


def _apart(middles: Mapping[str, tuple[float, ...]]) -> float:
    """How many times a site's spacing is another's, on the axis where it is most."""
    columns = zip(*middles.values())
    return max((max(column) / min(column) for column in columns if min(column) > 0), default=1.0)
