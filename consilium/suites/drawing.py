"""The phantom federations of a suite: their folders, and drawing of those that do not exist."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.data.partition import Cut, partition
from consilium.data.phantoms import write_phantom
from consilium.errors import StudyError
from consilium.files import read_json, write_json
from consilium.suites.sections import FEDERATION, Phantom, Suite
from consilium.suites.settings import Settings

RECORD = "phantom.json"  # in a drawn federation: how it was drawn
SITES = 12  # of a phantom that is cut, as in the APPLE paper


@dataclass(frozen=True)
class Drawing:
    """A phantom federation to draw."""

    phantom: Phantom
    place: Path
    seed: int  # of its patients
    scheme: str  # how one drawn site is split into many; empty: the phantom's own sites

    @property
    def facts(self) -> dict[str, Any]:
        drawn: dict[str, Any] = {
            "kind": self.phantom.kind,
            "cases": self.phantom.cases,
            "size": self.phantom.size,
            "seed": self.seed,
        }
        drawn |= {"tests": self.phantom.tests} if self.phantom.tests else {}
        drawn |= {"division": self.phantom.division} if self.phantom.division else {}
        drawn |= {"alike": self.phantom.alike} if self.phantom.alike else {}
        return {**drawn, "partition": self.scheme} if self.scheme else drawn

    @property
    def there(self) -> bool:
        """Whether it exists; one that was drawn with other settings is rejected (StudyError)."""
        if not self.place.is_dir():
            return False
        record = self.place / RECORD
        if record.exists() and (found := read_json(record)) != self.facts:
            raise StudyError(
                f"{self.place} was drawn as {found}, not as [phantom] says; delete it or write another `to`."
            )
        return True

    def draw(self) -> None:
        cases, size = self.phantom.cases or None, self.phantom.size or None
        if not self.scheme:
            division = self.phantom.division or None
            more: dict[str, Any] = {"alike": self.phantom.alike, "tests": self.phantom.tests}
            write_phantom(self.phantom.kind, self.place, cases, size, self.seed, division=division, **more)
        else:
            with tempfile.TemporaryDirectory() as aside:
                whole = Path(aside) / "whole"
                write_phantom(self.phantom.kind, whole, cases, size, self.seed, sites=1)
                partition(whole, self.place, Cut(self.scheme, SITES))  # fixed seed: the same classes at each site
        write_json(self.facts, self.place / RECORD)


def federation(suite: Suite, settings: Settings, seed: int) -> Path | None:
    """Where the phantom of a row and a seed is or will be; None if the suite draws none."""
    if suite.phantom is None:
        return None
    return _place(suite, str(settings.get(FEDERATION, suite.phantom.to)), seed)


def seeds(suite: Suite) -> list[int]:
    """All seeds, that of the choices first."""
    return list(dict.fromkeys([suite.heading.chosen_on, *suite.heading.seeds]))


def missing(suite: Suite) -> list[Drawing]:
    """Federations to draw."""
    phantom = suite.phantom
    if phantom is None:
        return []
    found = {}
    for seed in seeds(suite):
        drawn = seed + phantom.seed if phantom.each_seed else phantom.seed
        for to, scheme in phantom.federations.items():
            place = _place(suite, to, seed)
            found[place] = Drawing(phantom, place, drawn, scheme)
    return [drawing for drawing in found.values() if not drawing.there]


def _place(suite: Suite, to: str, seed: int) -> Path:
    assert suite.phantom is not None
    name = f"{to}-s{seed}" if suite.phantom.each_seed else to
    places = [Path.cwd() / name, suite.path.parent / name]
    return next((place for place in places if place.is_dir()), places[0]).resolve()
