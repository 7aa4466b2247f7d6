"""What training images are like, as ranges over cases, and how an image differs from them.

A site tells the ranges of its training cases at roll call, never a case's own figures; the run stores the union, and
`predict` names what lies outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.images import ImageArray, orientation
from consilium.data.orientation import reordered
from consilium.data.preprocess import Preprocess, Undo, by_type, rounded, shape_text
from consilium.ranges import Items, Range, Text
from consilium.tree import message

Figure = Annotated[float, Range(-1e30, 1e30)]
Span = tuple[Figure, Figure]  # the least and the greatest of all cases

SIZE_TIMES = 2.0  # a side so many times longer or shorter than any in training is told
SPACING_TIMES = 1.5
VALUE_TIMES = 4.0  # of the brightest value
MARGIN = 0.25  # of the range that the network saw
HALF_EMPTY = 0.25  # 16-bit files that use no more than this share of their range hold fewer bits


@dataclass(frozen=True)
class ImageFacts:
    """One image: as it is stored, and as the network sees it."""

    size: tuple[int, ...]  # in the study's orientation
    spacing: tuple[float, ...]  # mm; () where the file does not say
    orientation: str  # as stored; "" where the file does not say
    type: str  # of the stored numbers
    lowest: float  # stored value
    highest: float
    seen: tuple[float, float, float]  # percentiles 0.5, 50 and 99.5 of the preprocessed values

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> ImageFacts:
        values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in facts.items()}
        return cls(**values)


def image_facts(picture: ImageArray, array: NDArray[np.float32], undo: Undo) -> ImageFacts:
    """The facts of a picture and of the array (channels, *spatial) it became."""
    known = picture.geometry is not None
    spacing = tuple(float(step) for step in reordered(picture.spacing, undo.axes)) if known else ()
    low, middle, high = (float(value) for value in np.percentile(array, (0.5, 50, 99.5)))
    values = float(picture.array.min()), float(picture.array.max())
    return ImageFacts(
        undo.oriented, spacing, orientation(picture), str(picture.array.dtype), *values, (low, middle, high)
    )


@message
class DataProfile:
    """The ranges over training cases; a site tells them at roll call, and `read_profile` checks them."""

    cases: Annotated[int, Range(0, 1 << 40)]
    size: Annotated[tuple[Span, ...], Items(3)]  # per axis, in the study's orientation
    spacing: Annotated[tuple[Span, ...], Items(3)]  # mm per axis; () where a file does not say
    orientations: Annotated[
        tuple[Annotated[str, Text(3)], ...], Items(49)
    ]  # as stored; "" among them where a file does not say
    types: Annotated[tuple[Annotated[str, Text(16)], ...], Items(16)]
    lowest: Span  # of the stored values
    highest: Span
    seen: tuple[Span, Span, Span]  # of the percentiles 0.5, 50 and 99.5 of preprocessed values

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Any) -> DataProfile:
        """Raises ValueError where the facts are not those of a profile."""
        try:
            lowest, highest = _ranges([facts["lowest"], facts["highest"]])
            dark, middle, bright = _ranges(facts["seen"])
            made = cls(
                int(facts["cases"]),
                _ranges(facts["size"]),
                _ranges(facts["spacing"]),
                tuple(str(code)[:3] for code in facts["orientations"][:49]),
                tuple(str(name)[:16] for name in facts["types"][:16]),
                lowest,
                highest,
                (dark, middle, bright),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not a profile of training data ({error!r})") from error
        if len(made.size) not in (2, 3) or len(made.spacing) not in (0, len(made.size)):
            raise ValueError("not a profile of training data (other axes)")
        return made


def read_profile(facts: Any) -> DataProfile | None:
    """A stored or received profile; None where there is none, or none that can be used."""
    try:
        return None if facts is None else DataProfile.from_json(facts)
    except ValueError:
        return None


def _ranges(pairs: Sequence[Sequence[float]]) -> tuple[Span, ...]:
    found = tuple((float(low), float(high)) for low, high in pairs)
    if len(found) > 3 or not all(math.isfinite(low) and math.isfinite(high) and low <= high for low, high in found):
        raise ValueError("a range is not valid")
    return found


def profile_of(cases: Sequence[ImageFacts]) -> DataProfile | None:
    """The ranges over some images; None of none."""
    return joined(
        DataProfile(
            1,
            tuple((float(side), float(side)) for side in case.size),
            tuple((step, step) for step in case.spacing),
            (case.orientation,),
            (case.type,),
            (case.lowest, case.lowest),
            (case.highest, case.highest),
            ((case.seen[0], case.seen[0]), (case.seen[1], case.seen[1]), (case.seen[2], case.seen[2])),
        )
        for case in cases
    )


def joined(profiles: Iterable[DataProfile]) -> DataProfile | None:
    """The ranges over several sites; None of none."""
    found = list(profiles)
    if not found:
        return None
    lowest, highest = _around([(one.lowest, one.highest) for one in found])
    dark, middle, bright = _around([one.seen for one in found])
    return DataProfile(
        sum(one.cases for one in found),
        _around([one.size for one in found]),
        _around([one.spacing for one in found]) if all(one.spacing for one in found) else (),
        tuple(sorted({code for one in found for code in one.orientations})),
        tuple(sorted({name for one in found for name in one.types})),
        lowest,
        highest,
        (dark, middle, bright),
    )


def _around(parts: Sequence[Sequence[Span]]) -> tuple[Span, ...]:
    return tuple((min(r[0] for r in column), max(r[1] for r in column)) for column in zip(*parts, strict=True))


# ---------------------------------------------------------------------------------------------- one image


def unlike(image: ImageFacts, trained: DataProfile, how: Preprocess) -> list[str]:
    """Where an image lies outside what was trained on, in words; [] where nowhere."""
    if image.lowest == image.highest:
        return [f"all its values are {image.lowest:g}"]
    found = []
    if len(image.size) == len(trained.size) and any(
        not low / SIZE_TIMES <= side <= high * SIZE_TIMES for side, (low, high) in zip(image.size, trained.size)
    ):
        found.append(f"size {shape_text(image.size)} (trained on {_span(trained.size)})")
    if image.spacing and trained.spacing:
        if any(
            not low / SPACING_TIMES <= step <= high * SPACING_TIMES
            for step, (low, high) in zip(image.spacing, trained.spacing)
        ):
            found.append(f"spacing {shape_text(rounded(image.spacing))} mm (trained on {_span(trained.spacing)} mm)")
    elif trained.spacing:
        found.append("it does not say its spacing, as all training images did")
    if image.orientation not in trained.orientations and (not how.orientation or not image.orientation):
        codes = ", ".join(code or "none" for code in trained.orientations)
        found.append(f"stored orientation {image.orientation or 'not said'} (trained on {codes})")
    if by_type(how) and image.type not in trained.types:
        found.append(f"values of type {image.type} (trained on {', '.join(trained.types)}), which are scaled by type")
    return found + _odd_values(image, trained)


def _odd_values(image: ImageFacts, trained: DataProfile) -> list[str]:
    found = []
    below = trained.lowest[0] >= 0 > image.lowest and -image.lowest > 0.01 * trained.highest[1]
    bright = trained.highest[0] > 0 and not (
        trained.highest[0] / VALUE_TIMES <= image.highest <= trained.highest[1] * VALUE_TIMES
    )
    if below or bright:
        theirs = f"{trained.lowest[0]:g} to {trained.highest[1]:g}"
        found.append(
            f"values from {image.lowest:g} to {image.highest:g} (trained on {theirs}): another modality or unit?"
        )
    room = MARGIN * (trained.seen[2][1] - trained.seen[0][0])
    if any(not low - room <= value <= high + room for value, (low, high) in zip(image.seen, trained.seen)):
        names = ", ".join(f"{value:.2f}" for value in image.seen)
        theirs = ", ".join(f"{low:.2f} to {high:.2f}" for low, high in trained.seen)
        found.append(f"after preprocessing its dark, middle and bright values are {names} (trained on {theirs})")
    return found


def _span(ranges: Sequence[Span]) -> str:
    low, high = rounded([r[0] for r in ranges]), rounded([r[1] for r in ranges])
    return shape_text(low) if low == high else f"{shape_text(low)} to {shape_text(high)}"


# ---------------------------------------------------------------------------------------------- sites


def scale_faults(profiles: Mapping[str, DataProfile], how: Preprocess) -> tuple[list[str], list[str]]:
    """Where scaling by number type does wrong: what must be refused, and what is only said."""
    if not by_type(how):
        return [], []
    remedy = "declare a range with [preprocess] window, such as [0, 4095], or set percentiles = [0.5, 99.5]"
    few = {
        site: one.highest[1]
        for site, one in profiles.items()
        if "uint16" in one.types and one.highest[1] < HALF_EMPTY * np.iinfo(np.uint16).max
    }
    kinds = {site: frozenset(map(_rule, one.types)) for site, one in profiles.items()}
    mixed = len(frozenset.union(*kinds.values())) > 1 if kinds else False
    told = [
        f"site '{site}' stores 16-bit images whose values reach only {most:g} of 65535, and normalise = "
        f"'{how.normalise}' divides them by 65535" for site, most in sorted(few.items())
    ]  # fmt: skip
    if few and mixed:
        others = sorted({name for site, one in profiles.items() for name in one.types if site not in few})
        return [
            f"{told[0]}; other images ({', '.join(others) or 'of other types'}) are scaled otherwise: {remedy}."
        ], []
    if few:
        return [], [f"{'; '.join(told)}: {remedy}."]
    if mixed:
        listed = "; ".join(f"'{site}' {', '.join(one.types)}" for site, one in sorted(profiles.items()))
        if len({"own" in kind for kind in kinds.values()}) > 1:
            return [], [
                f"sites store images of different types ({listed}), and normalise = '{how.normalise}' scales some by "
                f"their type and some by each case's own range: {remedy}."
            ]
    return [], []


def _rule(kind: str) -> str:
    """How values of a type are scaled where no range is declared."""
    return kind if kind in ("uint8", "uint16") else "own"
