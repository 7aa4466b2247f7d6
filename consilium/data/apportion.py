"""Whole numbers in given proportions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from consilium.errors import StudyError
from consilium.wording import are, counted

Key = TypeVar("Key")


def apportion(table: Mapping[Key, float], cases: int, least: int = 1) -> dict[Key, int]:
    """A table's proportions scaled to `cases` in all: largest remainder, at least `least` (0 or 1) for each key."""
    if cases < least * len(table):
        raise StudyError(
            f"{counted(cases, 'case')} {are(cases)} too few; every site and split needs one, so ask for {len(table)} "
            "or more."
        )
    total = sum(table.values())
    scaled = {key: int(n * cases // total) for key, n in table.items()}
    by_remainder = sorted(table, key=lambda key: -(table[key] * cases % total))  # a stable sort: ties in table order
    for key in by_remainder[: cases - sum(scaled.values())]:
        scaled[key] += 1
    for key in [key for key, n in scaled.items() if n < least]:
        scaled[max(scaled, key=lambda other: scaled[other])] -= 1
        scaled[key] = 1
    return scaled
