"""Why an update cannot be merged: from elsewhere, of another shape, or not finite."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from consilium import tree
from consilium.envelope import Envelope
from consilium.tree import Packet
from consilium.weights import SiteName


def stamped(packet: Packet, head: Envelope, site: SiteName) -> Packet:
    """A packet that says which run, method, round and site it belongs to."""
    header = {**json.loads(packet.header), "stamp": _stamp(head, site)}
    return Packet(json.dumps(header, sort_keys=True, separators=(",", ":")), packet.tensors)


def _stamp(head: Envelope, site: SiteName) -> list[Any]:
    return [head.run, head.method, f"{head.round.phase} round {head.round.number}", site]


def fault_of(uplink: Any, expected: Any, packet: Packet, head: Envelope, site: SiteName) -> str:
    """What is wrong with a reply, in a sentence; empty if nothing is."""
    stamp = json.loads(packet.header).get("stamp")
    if stamp != _stamp(head, site):
        return f"it is of {_said(stamp)}, not of {_said(_stamp(head, site))}"
    got, want = tree.split(uplink), tree.split(expected)
    for path in got.weights.keys() ^ want.weights.keys():
        return f"'{path}' is {'missing' if path in want.weights else 'not expected in this phase'}"
    for path, weights in got.weights.items():
        if list(weights) != list(want.weights[path]):
            odd = sorted(weights.keys() ^ want.weights[path].keys())
            return f"'{path}' has other tensors than the study's network ({', '.join(odd[:3]) or 'in another order'})"
        for name, tensor in weights.items():
            like = want.weights[path][name]
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                return f"'{path}/{name}' is {_kind(tensor)}, where the study's network has {_kind(like)}"
            if not _finite(tensor):
                return f"'{path}/{name}' holds values that are not finite"
    for path in got.tensors.keys() ^ want.tensors.keys():
        return f"'{path}' is {'missing' if path in want.tensors else 'not expected in this phase'}"
    for path, tensor in got.tensors.items():
        model = want.tensors.get(path)
        if model is not None and (tensor.shape != model.shape or tensor.dtype != model.dtype):
            return f"'{path}' is {_kind(tensor)}, where {_kind(model)} is expected"
        if not _finite(tensor):
            return f"'{path}' holds values that are not finite"
    return _number_fault(json.loads(got.shape)["tree"], json.loads(want.shape)["tree"], "")


def _number_fault(part: Any, like: Any, path: str) -> str:
    """A number that is not finite, or a list of numbers of another length than expected."""
    if isinstance(part, float) and not math.isfinite(part):
        return f"'{path}' is not finite"
    numbers = isinstance(part, list) and all(isinstance(value, (int, float)) for value in part)
    if numbers and isinstance(like, list) and len(part) != len(like):
        return f"'{path}' has {len(part)} numbers, where {len(like)} are expected"
    items: Any = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for key, value in items:
        fault = _number_fault(value, like.get(key) if isinstance(like, dict) else None, f"{path}/{key}".strip("/"))
        if fault:
            return fault
    return ""


def _finite(tensor: torch.Tensor) -> bool:
    """A finite sum shows that all values are; only an overflow needs the slower look."""
    return not tensor.is_floating_point() or math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _said(stamp: Any) -> str:
    if not (isinstance(stamp, list) and len(stamp) == 4):
        return "an unknown round"
    run, method, round, site = stamp
    return f"run {run}, method {method}, {round}, site {site}"
