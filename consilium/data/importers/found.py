"""What an importer finds on disk, before anything is read or written: cases, what it left out, and what is in doubt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from consilium.data.importers.outlines import Outlines
from consilium.data.importers.rules import Rule

SHOWN = 20  # doubts; the rest are counted
HALVES = (0.5, 0.25, 0.25)  # train, valid, test: the FedSM paper's federations (tables 1 and 8)


@dataclass(frozen=True)
class Layer:
    """One file of a mask, and the rule that turns what it holds into label numbers."""

    path: Path
    rule: Rule | Outlines


@dataclass(frozen=True)
class RawCase:
    """One image as its publisher stores it, and where its truth lies."""

    site: str
    name: str
    patient: str
    images: tuple[Path, ...]  # one file, series or folder; several are the channels of one image
    raters: Mapping[str, tuple[Layer, ...]] = field(default_factory=dict)  # layers are painted one over the other
    label: str = ""  # the class, in a classification
    split: str = ""  # as published: "train", "valid", "test", or "" where the publisher does not say
    channel: int | None = None  # of an image of several channels only this one, from 0
    left_half: bool = False  # of a stereo pair in one picture only the left one
    regrid: bool = False  # a mask on another grid is brought to the image's, nearest voxel, by both headers


@dataclass(frozen=True)
class Found:
    """Everything that was found; `doubts` are written down and stop the import unless someone has looked."""

    task: str
    labels: tuple[str, ...]
    dimensions: int
    channels: int
    cases: tuple[RawCase, ...]
    left_out: tuple[str, ...] = ()  # by a stated rule
    doubts: tuple[str, ...] = ()
    contains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    annotated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by site; a site not named draws all
    source: str = ""
    licence: str = ""
    shares: tuple[float, float, float] = HALVES
    published_splits: bool = False  # whether the publisher's splits are used where nobody says otherwise
    root: Path | None = None  # the folder that links and references may lead into

    def relative(self, path: Path) -> str:
        """A path as it is within the source folder."""
        inside = self.root is not None and path.is_relative_to(self.root)
        return path.relative_to(self.root).as_posix() if inside and self.root is not None else path.name


def listed(doubts: Sequence[str]) -> str:
    """The first doubts, each on a line of its own."""
    more = f"\n  … and {len(doubts) - SHOWN} more" if len(doubts) > SHOWN else ""
    return "".join(f"\n  {doubt}" for doubt in doubts[:SHOWN]) + more
