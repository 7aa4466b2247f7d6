"""What version 0.1 wrote, in today's form: studies and the memories of sites.

In 0.1 UFPS had all its fields in [method]; now they are in five tables below it. The table of teachers is also that of
FedAvg*, FedProx* and FedASAM*.

In 0.1 FedSM had `[method] optimizer_state`, local training always kept its optimiser's state, and every other method
started each round without one. Now `[local] optimizer_state` says it for all methods, and every memory holds `states`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from consilium import __version__
from consilium.errors import RunError, StudyError

FORMAT = 1  # of the run folder; later versions read older ones or reject them with a message
KEPT = ("local", "separate", "pooled", "centralized", "solo")  # methods of 0.1 that kept their state without a field
STATES = {"global_state": "global", "personal_state": "personal"}  # fields of FedSM's memory, and the jobs they are of

_TEACHERS = {"teacher_rounds": "teachers.rounds", "teachers": "teachers.labels", "priority": "teachers.priority"}
_UNCERTAINTY = ("scheduler", "tail", "base", "blend", "width", "parts", "tau_mean", "tau_variance")
_SHARPNESS = ("rho", "eta", "keep_share", "explore_share", "momentum", "mask_every")
_UFPS = {
    **_TEACHERS,
    "arce": "noise.arce", "arce_growth": "noise.growth", "arce_from": "noise.start",
    **{name: f"uncertainty.{name}" for name in _UNCERTAINTY},
    "warmup": "uncertainty.weigh_from", "ws_end": "uncertainty.weigh_until", "ua_from": "uncertainty.trust_from",
    "gmt": "main_teacher.labels", "gmt_from": "main_teacher.start", "gmt_start": "main_teacher.when",
    "agreement": "main_teacher.agreement", "gmt_guard": "main_teacher.guard",
    "sharpness": "sharpness.strategy", "sharp_from": "sharpness.start",
    **{name: f"sharpness.{name}" for name in _SHARPNESS},
}  # fmt: skip
MODULES = {"ufps": _UFPS, "fedavg-pl": _TEACHERS, "fedprox-pl": _TEACHERS, "fedasam-pl": _TEACHERS}  # 0.1 → now

# fields of [method] that 0.1 did not have, and what its runs did
DID = {"fedsm": {"tuned_by": "pooled", "needed_gain": 0.0}}

GONE = {"firewall": {"against": 0.3, "likeness": 0.95}}  # keys of tables in [study] that 0.2 had, and their defaults


def reject_other_format(run: Path, origin: Mapping[str, Any]) -> None:
    """Reject a run folder that a version with another format made, by its `origin.json`."""
    if origin.get("format") != FORMAT:
        made = origin.get("versions", {}).get("consilium", "an unknown version")
        raise RunError(
            f"{run} was made by consilium {made} in format {origin.get('format')}; this is {__version__}, "
            f"which reads format {FORMAT}. Use that version, or start the study again."
        )


def without_gone(table: Mapping[str, Any]) -> dict[str, Any]:
    """[study] without the rules that the firewall no longer has."""

    def kept(name: str, value: Any) -> Any:
        gone = GONE.get(name, {})
        return {k: v for k, v in value.items() if k not in gone} if isinstance(value, Mapping) else value

    return {name: kept(name, value) for name, value in table.items()}


def with_gone(table: Mapping[str, Any]) -> dict[str, Any]:
    """The same with them at their defaults, so that a study keeps its hash."""
    return {name: {**value, **GONE[name]} if name in GONE else value for name, value in table.items()}


def current_key(methods: Collection[str], key: str, value: Any) -> str:
    """A field of [method] as it is called now in any of these methods: "rho" is "sharpness.rho" in UFPS."""
    if isinstance(value, Mapping):  # a table of today
        return key
    return next((MODULES[name][key] for name in methods if key in MODULES.get(name, {})), key)


def _in_modules(method: Mapping[str, Any]) -> dict[str, Any]:
    """[method] with the fields of 0.1 in their tables."""
    named = (str(method.get("name")),)
    found = {key: value for key, value in method.items() if current_key(named, key, value) == key}
    for key, value in method.items():
        module, dot, name = current_key(named, key, value).partition(".")
        if not dot:
            continue
        table = found.get(module, {})
        if table.get(name, value) != value:
            raise StudyError(
                f"[method] {key} = {value!r}, but [method.{module}] {name} = {table[name]!r}; keep the one in "
                f"[method.{module}]."
            )
        found[module] = {**table, name: value}
    return found


def told_by_0_1(method: Mapping[str, Any]) -> dict[str, Any]:
    """[method] with the flat fields of 0.1, so that a study keeps its hash and suites find runs of 0.1.

    A field that 0.1 did not have is left out if it says what 0.1 did.
    """
    did = DID.get(str(method.get("name")), {})
    old = {path: key for key, path in MODULES.get(str(method.get("name")), {}).items()}
    found: dict[str, Any] = {}
    for key, value in method.items():
        if key in did and value == did[key]:
            continue
        parts = {f"{key}.{name}": part for name, part in value.items()} if isinstance(value, Mapping) else {}
        if old and parts and parts.keys() <= old.keys():
            found |= {old[path]: part for path, part in parts.items()}
        else:
            found[key] = value
    return found


# of [study]; a run writes all of them, a person who gives [facts] because the data are elsewhere hardly ever does
COMPLETE = {"seed", "score_every", "leave_out", "away", "sites_per_round", "min_sites", "deadline", "keep_rounds"}


def current_study(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Study tables with `optimizer_state` in [local]; a run's own study of 0.1 says what that run did.

    Fields of UFPS are in the tables of its modules. Runs of 0.1 were decided by volumes, not by slices, and FedSM chose
    γ by pooled cases; 0.2 changed both at once, so a run whose study has `decides` chose γ by sites.
    """
    of_a_run = "facts" in tables and tables.get("study", {}).keys() >= COMPLETE
    if of_a_run and "decides" not in tables.get("task", {}):
        table = tables.get("method", {})
        method = {**DID.get(str(table.get("name")), {}), **table}
        tables = {**tables, "task": {**tables.get("task", {}), "decides": "volume"}, "method": method}
    method, local = _in_modules(tables.get("method", {})), dict(tables.get("local", {}))
    state = method.pop("optimizer_state", None)
    if state is not None and local.get("optimizer_state", state) != state:
        raise StudyError(
            f"[method] optimizer_state = {state!r}, but [local] optimizer_state = {local['optimizer_state']!r}; "
            "keep the one in [local]."
        )
    if state is None and of_a_run and "optimizer_state" not in local:
        state = "kept" if method.get("name") in KEPT else "fresh"
    if state is None:
        return {**tables, "method": method} if method else tables
    return {**tables, "method": method, "local": {**local, "optimizer_state": state}}


def _renamed(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A stored memory with `teaching` for what 0.1 called `school`."""
    try:
        shape = json.loads(document["shape"])
        memory = shape["tree"]["memory"]
        memory["teaching"] = memory.pop("school")
    except (ValueError, KeyError, TypeError, AttributeError):
        return document
    weights = {
        path.replace("memory/school/", "memory/teaching/", 1): digest for path, digest in document["weights"].items()
    }
    return {**document, "shape": json.dumps(shape), "weights": weights}


def current_memory(document: Mapping[str, Any], kind: type) -> Mapping[str, Any]:
    """A stored memory to be read as `kind`: with `states`, where 0.1 wrote none or called them otherwise."""
    document = _renamed(document)
    if "states" not in getattr(kind.__annotations__.get("memory"), "__dataclass_fields__", {}):
        return document  # a method without an optimiser of its own
    try:
        shape = json.loads(document["shape"])
        memory = shape["tree"]["memory"]
        if "states" in memory:
            return document
    except (ValueError, KeyError, TypeError):
        return document  # not a memory at all; who reads it says so
    # local training has one model and one state, which is named after it
    jobs = {"state": next(name for name in memory if name != "state")} if "state" in memory else STATES
    states = {job: memory.pop(old, None) for old, job in jobs.items()}
    memory["states"] = {job: state for job, state in states.items() if state is not None}
    moved = {f"memory/{old}/": f"memory/states/{job}/" for old, job in jobs.items()}

    def path(stored: str) -> str:
        return next((new + stored.removeprefix(old) for old, new in moved.items() if stored.startswith(old)), stored)

    weights = {path(stored): digest for stored, digest in document["weights"].items()}
    return {**document, "shape": json.dumps(shape), "weights": weights}
