"""What the papers' federations have in common: their labels, and the shares they draw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from consilium.data.importers.found import Found, RawCase
from consilium.data.importers.rules import ByValue

ORGANS = ("kidney", "liver", "spleen", "pancreas")  # mask values 1 to 4 (UFPS)
ORGAN_SHARES = (0.7, 0.1, 0.2)  # 84/12/24 of 120, 186/26/54 of 266, 140/20/40 of 200 (UFPS)
GLAND = ByValue({1: 1, 2: 1})  # the zones of the prostate together are the gland


def fundus(
    cases: Iterable[RawCase], left_out: Iterable[str], doubts: Iterable[str], source: str, licence: str, root: Path
) -> Found:
    """Photographs with disc and cup; the disc's region includes the cup's."""
    return Found(
        "segmentation", ("disc", "cup"), 2, 3, tuple(cases), tuple(left_out), tuple(doubts), {"disc": ("cup",)},
        source=source, licence=licence, root=root,
    )  # fmt: skip


def prostate(
    cases: Iterable[RawCase], left_out: Iterable[str], doubts: Iterable[str], source: str, licence: str, root: Path
) -> Found:
    """T2-weighted volumes with the whole gland."""
    return Found(
        "segmentation", ("prostate",), 3, 1, tuple(cases), tuple(left_out), tuple(doubts),
        source=source, licence=licence, root=root,
    )  # fmt: skip


def abdomen(
    cases: Iterable[RawCase], left_out: Iterable[str], doubts: Iterable[str], source: str, licence: str, root: Path
) -> Found:
    """CT volumes with four organs; kidneys are one label."""
    return Found(
        "segmentation", ORGANS, 3, 1, tuple(cases), tuple(left_out), tuple(doubts),
        source=source, licence=licence, root=root, shares=ORGAN_SHARES,
    )  # fmt: skip


def organs(values: Mapping[int, str]) -> ByValue:
    """A rule from a dataset's own values to the four organs; all its other organs are background."""
    return ByValue({value: 1 + ORGANS.index(name) for value, name in values.items()}, others=True)
