"""What version 0.1 wrote, in today's form: studies and the memories of sites.

In 0.1 FedSM had `[method] optimizer_state`, local training always kept its optimiser's state, and every other method
started each round without one. Now `[local] optimizer_state` says it for all methods, and every memory holds `states`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from consilium.errors import StudyError

KEPT = ("local", "separate", "pooled", "centralized", "solo")  # methods of 0.1 that kept their state without a field
STATES = {"global_state": "global", "personal_state": "personal"}  # fields of FedSM's memory, and the jobs they are of


def current_study(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Study tables with `optimizer_state` in [local]; a run's own study of 0.1 says what that run did."""
    method, local = dict(tables.get("method", {})), dict(tables.get("local", {}))
    state = method.pop("optimizer_state", None)
    if state is not None and local.get("optimizer_state", state) != state:
        raise StudyError(
            f"[method] optimizer_state = {state!r}, but [local] optimizer_state = {local['optimizer_state']!r}; "
            "keep the one in [local]."
        )
    if state is None and "facts" in tables and "optimizer_state" not in local:
        state = "kept" if method.get("name") in KEPT else "fresh"
    if state is None:
        return tables
    return {**tables, "method": method, "local": {**local, "optimizer_state": state}}


def current_memory(document: Mapping[str, Any], kind: type) -> Mapping[str, Any]:
    """A stored memory to be read as `kind`: with `states`, where 0.1 wrote none or called them otherwise."""
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
