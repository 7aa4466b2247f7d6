"""Which runs are repeats of one another, and what they are called."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from consilium.reports.reading import Kind, RunView, settings

NAMES = {
    "pooled": "Pooled", "centralized": "Pooled", "local": "Local", "separate": "Local", "solo": "SOLO",
    "fedavg": "FedAvg", "fedprox": "FedProx", "scaffold": "SCAFFOLD", "fedsm": "FedSM", "fedsm-extra": "FedSM-extra",
    "fedsm-ensemble": "FedSM-ensemble", "fedavg-finetune": "FedAvg-FT", "fedprox-finetune": "FedProx-FT",
    "fedavg-local": "FedAvg-local", "apfl": "APFL", "per-fedavg": "Per-FedAvg", "pfedme": "pFedMe", "apple": "APPLE",
    "fedamp": "FedAMP", "heurfedamp": "HeurFedAMP", "fedfomo": "FedFomo", "ufps": "UFPS", "fedbn": "FedBN",
    "fedasam": "FedASAM", "fedcrld": "FedCRLD", "dod": "DOD*", "menu-net": "MENU-Net", "cond-dec": "Cond-dec",
    "fedavg-pl": "FedAvg*", "fedprox-pl": "FedProx*", "moon-pl": "MOON*", "fedalign-pl": "FedAlign*",
    "fedasam-pl": "FedASAM*", "cps-pl": "CPS*", "ms-kd-pl": "MS-KD*",
    "fedavg-foreground": "FedAvg, own foreground", "multi-head": "Multi-head", "multi-encoder": "Multi-encoder",
    "multi-decoder": "Multi-decoder",
}  # fmt: skip

_APART = ("study.seed", "study.name")  # runs that differ only in these are repeats of one another
_FOLLOWS = ("study.score_every",)  # chosen to suit other settings, which tell runs apart better
_EMPTY: tuple[object, ...] = ({}, [], "")  # settings that are not there: "away {}" says nothing
_ORDER: dict[str, int] = {"bound": 0, "local": 1, "federated": 2}


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    name: str
    kind: Kind
    runs: tuple[RunView, ...]


def groups(runs: Sequence[RunView]) -> tuple[Group, ...]:
    """Runs by method and settings, in the order given, bounds and local training first; no group has a seed twice."""
    alike: dict[str, list[RunView]] = defaultdict(list)
    left_out = repeated(runs)
    for run in once(runs):
        if run.folder not in left_out:
            alike[_alike(run, _APART)].append(run)
    found = [part for same in alike.values() for part in _seeds_apart(same)]
    made = [Group(name, part[0].kind, tuple(part)) for name, part in zip(_names(found), found, strict=True)]
    return tuple(sorted(made, key=lambda group: _ORDER[group.kind]))


def _seeds_apart(alike: list[RunView]) -> Iterator[list[RunView]]:
    """Runs of one study; if a seed is there twice with other scores, by folder, and if need be each by itself."""
    if _seed_once(alike):
        yield alike
        return
    folders: dict[Path, list[RunView]] = defaultdict(list)
    for run in alike:
        folders[run.folder.parent].append(run)
    for found in folders.values():
        yield from [found] if _seed_once(found) else [[run] for run in found]


def _seed_once(runs: Iterable[RunView]) -> bool:
    """Whether no seed has two results."""
    seeds = [run.seed for run in runs if run.summary is not None]
    return len(seeds) == len(set(seeds))


def once(runs: Iterable[RunView]) -> list[RunView]:
    """A folder named twice counts once."""
    return list({run.folder: run for run in runs}.values())


def repeated(runs: Iterable[RunView]) -> dict[Path, RunView]:
    """Finished runs that are another one again, and that one: the same study, seed and scores.

    Such a run, in a copy or under another name, is no second seed.
    """
    found: dict[str, RunView] = {}
    again: dict[Path, RunView] = {}
    for run in once(runs):
        if run.summary is None:
            continue
        outcome = json.dumps([run.summary.get("best"), run.summary.get("last")], sort_keys=True)
        kept = found.setdefault(_alike(run, ("study.name",)) + outcome, run)
        if kept is not run:
            again[run.folder] = kept
    return again


def _alike(run: RunView, apart: Collection[str]) -> str:
    """The same for runs of one method that differ in nothing but the keys set apart."""
    shared = {key: value for key, value in settings(run).items() if key not in apart}
    return run.method + json.dumps(shared, sort_keys=True, default=str)


def _names(groups: Sequence[Sequence[RunView]]) -> list[str]:
    """The method's name, and what sets a group's runs apart from the others of their method."""
    names, runs = [], [group[0] for group in groups]
    for run in runs:
        same = [settings(other) for other in runs if other.method == run.method]
        mine = settings(run)
        differ = [key for key in mine if key not in _APART and any(other.get(key) != mine[key] for other in same)]
        keys = [key for key in differ if not key.startswith("facts.")]  # they follow from the federation
        keys = [key for key in keys if key not in _FOLLOWS] or keys
        details = ", ".join(f"{key.partition('.')[2]} {_short(mine[key])}" for key in keys if mine[key] not in _EMPTY)
        name = NAMES.get(run.method, run.method)
        if len(keys) > 3:
            details = run.name  # a list of settings is no name
        names.append(f"{name} ({details})" if details else name)
    # an older study may lack the very key that sets them apart, and a run may be there twice with other scores
    short = [group[0].name if len(group) == 1 else group[0].folder.parent.name for group in groups]
    found = names
    for apart in (short, ["/".join(run.folder.parts[-2:]) for run in runs]):
        found = [
            one if found.count(one) == 1 else f"{name} ({folder})"
            for one, name, folder in zip(found, names, apart, strict=True)
        ]
    return found


def _short(value: object) -> str:
    """A setting in a name: of a path, which says where someone's data lie, only the last part."""
    return str(value).rpartition("/")[2] if isinstance(value, str) else str(value)
