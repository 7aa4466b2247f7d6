"""Checks every reply of a site once, at the server: the usable message, or the reason why it is rejected."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from consilium import tree
from consilium.message_parsing import field_path, joined
from consilium.messages import ScoreSheet
from consilium.method import CasesOf, Maybe
from consilium.score_sheets import Scorer, rows_of
from consilium.scores.rows import ScoreRow
from consilium.site import Round
from consilium.tree import Packet
from consilium.weights import SMALL, SiteName, Weights

T = TypeVar("T")
LARGEST = 1e15  # bound of any number in a reply: sums of 10⁸ squares still fit into 32-bit floats
MOST = 2**40  # bound of any count
LONGEST = 1000  # characters of a text
STATE = 1e12  # bound of any number in a merged state: variances of unscaled images reach 1e10


def accepted(
    packet: Packet, kind: type[T], expected: T, cases: Mapping[str, int] | None = None
) -> tuple[T, str] | tuple[None, str]:
    """The message in a reply, or None and the reason why it cannot be merged.

    The wire knows the site and the round of the reply. `cases` are the numbers that the site declared, by split.
    """
    try:
        uplink = tree.unflatten(packet, kind, whole=True)
    except tree.PacketError as error:
        return None, str(error)
    bounded = all(map(_bounded, packet.blocks()))  # tensor by tensor only to name the one that is not
    fault = _fault(uplink, expected, "", _Known(cases or {}, bounded))
    return (None, fault) if fault else (uplink, "")


def scored(packet: Packet, scorer: Scorer, round: Round) -> tuple[list[ScoreRow], str] | tuple[None, str]:
    """The scores in a reply, or None and the reason why the whole sheet is rejected."""
    try:
        return rows_of(tree.unflatten(packet, ScoreSheet, whole=True), scorer, round), ""
    except tree.PacketError as error:
        return None, str(error)


def new_parts(merged: Any, before: Any) -> list[Weights]:
    """The models of a merged state that the state before does not have."""
    known = {id(part) for part in tree.split(before).weights.values()}
    return [part for part in tree.split(merged).weights.values() if id(part) not in known]


def spoilt(parts: Iterable[Weights]) -> str:
    """Why a merged state with these new models cannot be kept, as the end of a sentence."""
    most = max(map(_largest, parts), default=0.0)
    if most <= STATE:
        return ""
    return f"holds values up to {most:.3g}" if math.isfinite(most) else "is not finite"


def by_size(replies: Mapping[SiteName, Any]) -> list[tuple[SiteName, float]]:
    """The largest value of each reply's weights, in descending order."""
    found = {
        name: max(map(_largest, tree.split(reply).weights.values()), default=0.0) for name, reply in replies.items()
    }
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))


def _largest(weights: Weights) -> float:
    """The largest absolute value; infinite if one is not a number."""
    most = 0.0
    for tensor in weights.values():
        if tensor.is_floating_point() and tensor.numel():
            low, high = (side.item() for side in torch.aminmax(tensor))
            most = max(most, -low, high) if math.isfinite(low + high) else math.inf
    return most


class _Known(NamedTuple):
    cases: Mapping[str, int]  # that the site declared, by split
    bounded: bool  # no number in any tensor is beyond the bound


def _fault(value: Any, like: Any, path: str, known: _Known) -> str:
    """Where a message differs from the expected one: names, keys, lengths, shapes, types, finite numbers."""
    if isinstance(like, Maybe):
        return "" if value is None else _fault(value, like.like, path, known)
    if isinstance(like, CasesOf):
        most = known.cases.get(like.split, 0)
        return "" if 0 <= value <= most else f"'{path}' is {value}, where the site has {most} {like.split} cases"
    if (value is None) != (like is None):
        return f"'{path}' is {'missing' if value is None else 'not expected in this phase'}"
    if isinstance(value, Weights):
        return _weights_fault(value, like, path, known.bounded)
    if isinstance(value, torch.Tensor):
        return _tensor_fault(value, like, path, "{} is expected", known.bounded)
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
        parts = ((getattr(value, n), getattr(like, n), field_path(path, n)) for n in names)
        return _first(parts, known) or _contradiction(value, path)
    if isinstance(value, Mapping):
        for key in sorted(value.keys() ^ like.keys()):
            return f"'{joined(path, key)}' is {'missing' if key in like else 'not expected'}"
        return _first(((value[key], like[key], joined(path, key)) for key in value), known)
    if isinstance(value, tuple):
        if len(value) != len(like):
            return f"'{path}' has {len(value)} values, where {len(like)} are expected"
        return _first(((part, like[i], joined(path, str(i))) for i, part in enumerate(value)), known)
    if isinstance(value, float) and not abs(value) <= LARGEST:
        return f"'{path}' is {'too large' if math.isfinite(value) else 'not finite'}"
    if isinstance(value, int) and not (0 if like >= 0 else -MOST) <= value <= MOST:  # whole numbers count something
        return f"'{path}' is {'negative' if value < 0 else 'too large'}"
    if isinstance(value, str) and len(value) > LONGEST:
        return f"'{path}' is too long"
    return ""


def _first(parts: Iterable[tuple[Any, Any, str]], known: _Known) -> str:
    return next((fault for part in parts if (fault := _fault(*part, known))), "")


def _contradiction(value: Any, path: str) -> str:
    """A contradiction between the values of a message, which ranges of single values cannot find."""
    check = getattr(value, "contradiction", None)
    why = check() if check else ""
    return f"'{path}': {why}" if why and path else why


def _weights_fault(weights: Weights, like: Weights, path: str, bounded: bool) -> str:
    if list(weights) != list(like):
        odd = sorted(weights.keys() ^ like.keys())
        return f"'{path}' has other tensors than the study's network ({', '.join(odd[:3]) or 'in another order'})"
    for name, tensor in weights.items():
        if fault := _tensor_fault(tensor, like[name], f"{path}/{name}", "the study's network has {}", bounded):
            return fault
        if tensor.nbytes >= SMALL:
            weights.forget(name)
    return ""


def _tensor_fault(tensor: torch.Tensor, like: torch.Tensor, path: str, wanted: str, bounded: bool) -> str:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        return f"'{path}' is {_kind(tensor)}, where {wanted.format(_kind(like))}"
    if bounded or _bounded(tensor):
        return ""
    return f"'{path}' holds values that are {'too large' if torch.isfinite(tensor).all() else 'not finite'}"


def _bounded(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.bool or not tensor.numel():
        return True
    low, high = (side.item() for side in torch.aminmax(tensor))  # NaN if any value is NaN
    return low >= -LARGEST and high <= LARGEST


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
