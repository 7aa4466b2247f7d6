"""Which runs are repeats of one another, and what they are called."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
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
    alike: dict[tuple[str, int], list[RunView]] = defaultdict(list)
    seeds: Counter[tuple[str, int]] = Counter()
    left_out = repeated(runs)
    for run in once(runs):
        if run.folder not in left_out:
            settings = _alike(run, _APART)
            alike[settings, seeds[settings, run.seed]].append(run)
            seeds[settings, run.seed] += 1
    names = _names([found[0] for found in alike.values()])
    made = [Group(name, found[0].kind, tuple(found)) for name, found in zip(names, alike.values(), strict=True)]
    return tuple(sorted(made, key=lambda group: _ORDER[group.kind]))


def once(runs: Iterable[RunView]) -> list[RunView]:
    """A folder named twice counts once."""
    return list({run.folder: run for run in runs}.values())


def repeated(runs: Iterable[RunView]) -> dict[Path, RunView]:
    """Finished runs that are another one again, and that one: the same study, seed, cases and scores.

    Such a run, in a copy or under another name, is no second seed.
    """
    found: dict[str, RunView] = {}
    again: dict[Path, RunView] = {}
    for run in once(runs):
        if run.summary is None:
            continue
        tables = {site: facts.get("table") for site, facts in run.origin.get("sites", {}).items()}
        outcome = json.dumps([tables, run.summary.get("best"), run.summary.get("last")], sort_keys=True)
        kept = found.setdefault(_alike(run, ("study.name",)) + outcome, run)
        if kept is not run:
            again[run.folder] = kept
    return again


def _alike(run: RunView, apart: Collection[str]) -> str:
    """The same for runs of one method that differ in nothing but the keys set apart."""
    shared = {key: value for key, value in settings(run).items() if key not in apart}
    return run.method + json.dumps(shared, sort_keys=True, default=str)


def _names(runs: Sequence[RunView]) -> list[str]:
    """The method's name, and what sets a run apart from the others of its method."""
    names = []
    for run in runs:
        same = [settings(other) for other in runs if other.method == run.method]
        mine = settings(run)
        differ = [key for key in mine if key not in _APART and any(other.get(key) != mine[key] for other in same)]
        keys = [key for key in differ if not key.startswith("facts.")]  # they follow from the federation
        details = ", ".join(f"{key.partition('.')[2]} {_short(mine[key])}" for key in keys if mine[key] not in _EMPTY)
        name = NAMES.get(run.method, run.method)
        if len(keys) > 3:
            details = run.name  # a list of settings is no name
        names.append(f"{name} ({details})" if details else name)
    # an older study may lack the very key that sets them apart, and a run may be there twice with other scores
    found = names
    for parts in (1, 2):
        apart = ["/".join(run.folder.parts[-parts:]) for run in runs]
        found = [
            one if found.count(one) == 1 else f"{name} ({folder})"
            for one, name, folder in zip(found, names, apart, strict=True)
        ]
    return found


def _short(value: object) -> str:
    """A setting in a name: of a path, which says where someone's data lie, only the last part."""
    return str(value).rpartition("/")[2] if isinstance(value, str) else str(value)
