"""The server's door: what a site sent, if it can be used, or why not. Behind it nothing is checked again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from consilium import tree
from consilium.messages import ScoreSheet
from consilium.method import Maybe
from consilium.score_sheets import Scorer, rows_of
from consilium.scores import Row
from consilium.site import Round
from consilium.tree import Packet
from consilium.weights import SMALL, Weights

T = TypeVar("T")
LARGEST = 1e15  # of any number in a reply: squares, and sums of a hundred million of them, still fit into 32 bits
MOST = 2**40  # of anything that is counted
LONGEST = 1000  # characters of a text


def accepted(packet: Packet, kind: type[T], expected: T) -> tuple[T, str] | tuple[None, str]:
    """The message in a reply, or None and why it cannot be merged; nothing else is let through to a method.

    The reply is to the order that was sent: whose it is, and of which round, the wire knows.
    """
    try:
        uplink = tree.unflatten(packet, kind)
    except tree.PacketError as error:
        return None, str(error)
    fault = _fault(uplink, expected, "")
    return (None, fault) if fault else (uplink, "")


def scored(packet: Packet, scorer: Scorer, round: Round) -> tuple[list[Row], str] | tuple[None, str]:
    """The scores in a reply, or None and why the sheet is refused as a whole."""
    try:
        return rows_of(tree.unflatten(packet, ScoreSheet), scorer, round), ""
    except tree.PacketError as error:
        return None, str(error)


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
    if isinstance(value, float) and not abs(value) <= LARGEST:
        return f"'{path}' is {'too large' if math.isfinite(value) else 'not finite'}"
    if isinstance(value, int) and not (0 if like >= 0 else -MOST) <= value <= MOST:  # whole numbers count something
        return f"'{path}' is {'negative' if value < 0 else 'too large'}"
    if isinstance(value, str) and len(value) > LONGEST:
        return f"'{path}' is too long"
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
    return _value_fault(tensor, path)


def _value_fault(tensor: torch.Tensor, path: str) -> str:
    if tensor.dtype == torch.bool or not tensor.numel():
        return ""
    low, high = (side.item() for side in torch.aminmax(tensor))  # NaN if one is
    if low >= -LARGEST and high <= LARGEST:
        return ""
    return f"'{path}' holds values that are {'too large' if math.isfinite(low + high) else 'not finite'}"


def _under(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
