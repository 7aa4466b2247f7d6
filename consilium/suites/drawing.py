"""The phantom federations of a suite: where they are, and drawing those that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from consilium.data.phantoms import write_phantom
from consilium.errors import StudyError
from consilium.store import read_json, write_json
from consilium.suites.reading import Suite

RECORD = "phantom.json"  # in a drawn federation: how it was drawn


def federation(suite: Suite, seed: int) -> Path | None:
    """Where the phantom of a seed is or will be; None if the suite draws none."""
    if suite.phantom is None:
        return None
    name = f"{suite.phantom.to}-s{seed}" if suite.phantom.each_seed else suite.phantom.to
    places = [Path.cwd() / name, suite.path.parent / name]
    return next((place for place in places if place.is_dir()), places[0]).resolve()


def seeds(suite: Suite) -> list[int]:
    """All seeds, that of the choices first."""
    return list(dict.fromkeys([suite.choose_seed, *suite.heading.seeds]))


def missing(suite: Suite) -> dict[Path, int]:
    """Federations to draw, and the seed of their patients."""
    phantom = suite.phantom
    if phantom is None:
        return {}
    places = {
        federation(suite, seed): seed + phantom.seed if phantom.each_seed else phantom.seed for seed in seeds(suite)
    }
    return {place: drawn for place, drawn in places.items() if place is not None and not _there(suite, place, drawn)}


def draw(suite: Suite, place: Path, seed: int) -> None:
    assert suite.phantom is not None
    write_phantom(suite.phantom.kind, place, suite.phantom.cases or None, suite.phantom.size or None, seed)
    write_json(_facts(suite, seed), place / RECORD)


def _there(suite: Suite, place: Path, seed: int) -> bool:
    """Whether a federation is drawn; one drawn otherwise than the suite says is refused."""
    if not place.is_dir():
        return False
    record = place / RECORD
    if record.exists() and (found := read_json(record)) != _facts(suite, seed):
        raise StudyError(f"{place} was drawn as {found}, not as [phantom] says; delete it or write another `to`.")
    return True


def _facts(suite: Suite, seed: int) -> dict[str, Any]:
    assert suite.phantom is not None
    return {"kind": suite.phantom.kind, "cases": suite.phantom.cases, "size": suite.phantom.size, "seed": seed}
