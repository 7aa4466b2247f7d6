"""The options and the result of an analysis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from consilium.analysis.opening import Runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """The options of an analysis."""

    site: str | None = None  # the site whose cases or relationships are used; None: the first
    radius: float | None = None  # of the loss surface; None: half the length of the first model
    points: int = 21
    directions: int = 10
    seed: int = 0
    filterwise: bool = False
    layout: str = "tsne"  # of the features; "pca" is fast
    cases: int = 16  # about this many training cases of a site, for analyses with gradients or many passes


@dataclass(frozen=True)
class Finding:
    """The result of one analysis; `caption` states it in words, also for readers who cannot see the figures."""

    name: str  # of its files
    title: str
    caption: str
    numbers: Mapping[str, Any]
    figures: Mapping[str, Figure]  # by file name without suffix
    table: str = ""  # Markdown
    run: Path | None = None  # the analysed run; None: all runs together


def in_words(found: Mapping[str, Mapping[str, T]], say: Callable[[T], str]) -> str:
    """A table as a sentence: "ada: fedavg 0.3, fedsm 0.2; bea: …"."""
    rows = {row: ", ".join(f"{name} {say(one)}" for name, one in by.items()) for row, by in found.items()}
    return "; ".join(f"{row}: {text}" for row, text in rows.items())


def as_json(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row: {name: one.to_json() for name, one in by.items()} for row, by in found.items()}


def asked_sites(runs: Runs, options: Options) -> list[str]:
    return [options.site] if options.site else runs.opened[0].members
