"""Why an update cannot be merged: from elsewhere, of another shape, or not finite."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from consilium import tree
from consilium.envelope import Envelope
from consilium.method import Maybe
from consilium.tree import Packet
from consilium.weights import SMALL, SiteName, Weights

T = TypeVar("T")


def stamped(packet: Packet, head: Envelope, site: SiteName) -> Packet:
    """A packet that says which run, method, round and site it belongs to."""
    header = {**json.loads(packet.header), "stamp": _stamp(head, site)}
    return Packet(json.dumps(header, sort_keys=True, separators=(",", ":")), packet.tensors)


def _stamp(head: Envelope, site: SiteName) -> list[Any]:
    return [head.run, head.method, f"{head.round.phase} round {head.round.number}", site]


def accepted(
    packet: Packet, kind: type[T], expected: T, head: Envelope, site: SiteName
) -> tuple[T, str] | tuple[None, str]:
    """The message in a reply, or None and why it cannot be merged; nothing else is let through to a method."""
    try:
        uplink = tree.unflatten(packet, kind)
    except tree.PacketError as error:
        return None, str(error)
    fault = fault_of(uplink, expected, packet, head, site)
    return (None, fault) if fault else (uplink, "")


def fault_of(uplink: Any, expected: Any, packet: Packet, head: Envelope, site: SiteName) -> str:
    """What is wrong with a reply, in a sentence; empty if nothing is."""
    stamp = json.loads(packet.header).get("stamp")
    if stamp != _stamp(head, site):
        return f"it is of {_said(stamp)}, not of {_said(_stamp(head, site))}"
    return _fault(uplink, expected, "")


def _fault(value: Any, like: Any, path: str) -> str:
    """Where a part of a message is not as the expected one: names, keys, lengths, shapes, types, finite numbers."""
    if isinstance(like, Maybe):
        return "" if value is None else _fault(value, like.like, path)
    if (value is None) != (like is None):
        return f"'{path}' is {'missing' if value is None else 'not expected in this phase'}"
    if isinstance(value, Weights):
        return _weights_fault(value, like, path)
    if isinstance(value, torch.Tensor):
        return _tensor_fault(value, like, path, "{} is expected")
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
        return _first((getattr(value, n), getattr(like, n), _under(path, n.removesuffix("_"))) for n in names)
    if isinstance(value, Mapping):
        for key in sorted(value.keys() ^ like.keys()):
            return f"'{_under(path, key)}' is {'missing' if key in like else 'not expected'}"
        return _first((value[key], like[key], _under(path, key)) for key in value)
    if isinstance(value, tuple):
        if len(value) != len(like):
            return f"'{path}' has {len(value)} values, where {len(like)} are expected"
        return _first((part, like[i], _under(path, str(i))) for i, part in enumerate(value))
    if isinstance(value, float) and not math.isfinite(value):
        return f"'{path}' is not finite"
    if isinstance(value, int) and not (0 if like >= 0 else -(2**63)) <= value < 2**63:  # whole numbers count something
        return f"'{path}' is {'negative' if value < 0 else 'too large'}"
    return ""


def _first(parts: Iterable[tuple[Any, Any, str]]) -> str:
    return next((fault for part in parts if (fault := _fault(*part))), "")


def _weights_fault(weights: Weights, like: Weights, path: str) -> str:
    if list(weights) != list(like):
        odd = sorted(weights.keys() ^ like.keys())
        return f"'{path}' has other tensors than the study's network ({', '.join(odd[:3]) or 'in another order'})"
    for name, tensor in weights.items():
        if fault := _tensor_fault(tensor, like[name], f"{path}/{name}", "the study's network has {}"):
            return fault
        if tensor.nbytes >= SMALL:
            weights.forget(name)
    return ""


def _tensor_fault(tensor: torch.Tensor, like: torch.Tensor, path: str, wanted: str) -> str:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        return f"'{path}' is {_kind(tensor)}, where {wanted.format(_kind(like))}"
    return "" if _finite(tensor) else f"'{path}' holds values that are not finite"


def _under(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


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
