"""Whatever happens to a reply on its way: it is refused in a sentence, reaches no method, and nothing is raised."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from consilium.intake import accepted
from consilium.learning.discriminant import FeatureSums
from consilium.method import Maybe
from consilium.methods import METHODS
from consilium.site import Round, SiteCard
from consilium.timeline import timeline
from consilium.tree import Packet, flatten, message
from consilium.weights import Weights
from tests.core.counting import Counting
from tests.toy import SIZES, toy_study

ROUND = Round(4, "train", 4, 9)
QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)
DOOR = ("ada", "bea", "cid")


@message
class State:
    step: int
    slots: Mapping[str, Weights]


@message
class Rich:
    """One field of every kind a message can have."""

    global_: Weights
    personal: Weights | None
    nothing: Weights | None
    state: State
    gains: Mapping[str, float]
    scores: tuple[float, ...]
    wants: tuple[str, ...]
    parts: tuple[State, ...]
    mask: Tensor
    table: Tensor
    holds: bool
    note: str
    loss: float
    steps: int


def model(value: float) -> Weights:
    return Weights({"a": torch.full((2, 3), value), "b": torch.full((3,), value), "n": torch.tensor(7)})


def rich(value: float) -> Rich:
    state = State(3, {"m": model(value), "v": model(value)})
    mask, table = torch.tensor([[True, False, True]] * 3), torch.full((2, 2), value)
    gains = dict.fromkeys(DOOR, value)
    lists = (value,) * 4, DOOR[:2], (state,)
    return Rich(model(value), model(value), None, state, gains, *lists, mask, table, True, "ok", value, 5)


def reply(item: Any) -> Packet:
    return flatten(item)


def refusal(packet: Packet, kind: type, expected: Any) -> str:
    """Why a reply is refused; empty if it is let through."""
    uplink, why = accepted(packet, kind, expected)
    assert (uplink is None) == bool(why)
    return why


# ------------------------------------------------------------------------------------------- ways to go wrong


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every node of a JSON tree below the root."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, part in items:
        yield (*path, key)
        yield from places(part, (*path, key))


WRONG: dict[type, list[Any]] = {  # values that are never right in place of one of this type
    dict: [None, [], 3, {}],
    list: [None, {}, "tensor", ["zz"], [[]], [{}]],
    str: [None, 3, ["a"], {}],
    bool: [None, 1, "true", []],
    int: [None, 2.5, "3", [], True, -1, 2**63, 10**400],
    float: [None, "low", [], {}, math.nan, math.inf, -math.inf, 10**400, False],
    type(None): [3, "x", {}, ["a"]],
}


@st.composite
def spoilt_header(draw: st.DrawFn, packet: Packet) -> Packet:
    """One node of the message's shape changed, removed, renamed or doubled; its tensors stay."""
    header = json.loads(packet.header)
    shape = json.loads(header["message"])
    tree = copy.deepcopy(shape["tree"])
    path = draw(st.sampled_from(sorted(places(tree), key=str)))
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    key, old = path[-1], parent[path[-1]]
    ways = ["value", "removed", *(["renamed"] if isinstance(parent, dict) else ["doubled"])]
    way = draw(st.sampled_from(ways))
    if way == "value":
        parent[key] = draw(st.sampled_from([wrong for wrong in WRONG[type(old)] if wrong != old or wrong is not old]))
    elif way == "removed":
        del parent[key]
    elif way == "renamed":
        parent[f"{key}x"] = parent.pop(key)
    else:
        parent.append(old)
    header["message"] = json.dumps({**shape, "tree": tree})
    return Packet(json.dumps(header), packet.tensors)


@st.composite
def spoilt_tensor(draw: st.DrawFn, packet: Packet) -> Packet:
    """One tensor changed in shape, type or values, removed, or one added."""
    tensors = dict(packet.tensors)
    name = draw(st.sampled_from(sorted(tensors)))
    tensor = tensors[name]
    ways = ["removed", "added", "longer", "flat", "type"] + (["nan", "inf"] if tensor.is_floating_point() else [])
    way = draw(st.sampled_from(ways))
    if way in ("nan", "inf"):
        tensor = tensor.clone()
        tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = float(way)
        tensors[name] = tensor
    elif way == "removed":
        del tensors[name]
    elif way == "added":
        tensors[f"{name}x"] = tensor
    elif way == "longer":
        tensors[name] = torch.cat([tensor.reshape(-1), tensor.reshape(-1)[:1]])
    elif way == "flat":
        tensors[name] = tensor.reshape(1, -1, 1)
    else:
        tensors[name] = tensor.to(torch.float64 if tensor.dtype != torch.float64 else torch.float32)
    return Packet(packet.header, tensors)


SOUND = reply(rich(0.5))


def test_a_sound_reply_is_let_through() -> None:
    assert refusal(SOUND, Rich, rich(0.0)) == ""


@QUICK
@given(spoilt_header(SOUND))
def test_a_spoilt_field_is_refused(packet: Packet) -> None:
    why = refusal(packet, Rich, rich(0.0))
    assert why and "\n" not in why and "Error" not in why


@QUICK
@given(spoilt_tensor(SOUND))
def test_a_spoilt_tensor_is_refused(packet: Packet) -> None:
    assert refusal(packet, Rich, rich(0.0))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=5), parts, max_size=4),
    max_leaves=12,
)


@QUICK
@given(json_values, st.sampled_from(["header", "message", "tree", "masks", "text"]))
def test_any_other_header_is_refused(value: Any, where: str) -> None:
    header = json.loads(SOUND.header)
    if where == "header":
        text = json.dumps(value)
    elif where == "text":
        text = str(value)
    elif where == "tree":
        text = json.dumps({**header, "message": json.dumps({"type": "Rich", "tree": value})})
    else:
        text = json.dumps({**header, where: json.dumps(value) if where == "message" else value})
    assert refusal(Packet(text, SOUND.tensors), Rich, rich(0.0))


def test_a_header_that_nests_without_end_is_refused() -> None:
    deep = "[" * 100_000
    assert "not valid" in refusal(Packet(deep, SOUND.tensors), Rich, rich(0.0))
    inside = json.dumps({**json.loads(SOUND.header), "message": deep})
    assert "not valid" in refusal(Packet(inside, SOUND.tensors), Rich, rich(0.0))


FAULTS: dict[str, tuple[Rich, str]] = {
    "a key too many": (replace(rich(0.5), gains={**rich(0.5).gains, "dan": 0.1}), "'gains/dan' is not expected"),
    "a key too few": (replace(rich(0.5), gains={"ada": 0.1, "bea": 0.1}), "'gains/cid' is missing"),
    "a longer list": (replace(rich(0.5), scores=(0.5,) * 5), "'scores' has 5 values, where 4 are expected"),
    "a shorter list of names": (replace(rich(0.5), wants=()), "'wants' has 0 values, where 2 are expected"),
    "a slot too few": (replace(rich(0.5), state=State(3, {"m": model(0.5)})), "'state/slots/v' is missing"),
    "deep inside": (
        replace(rich(0.5), parts=(State(3, {"m": model(0.5), "v": model(math.nan)}),)),
        "'parts/0/slots/v/a' holds values that are not finite",
    ),
    "a negative count": (replace(rich(0.5), steps=-1), "'steps' is negative"),
    "an absurd count": (replace(rich(0.5), state=State(2**70, rich(0.5).state.slots)), "'state/step' is too large"),
    "too much": (replace(rich(0.5), nothing=model(0.5)), "'nothing' is not expected in this phase"),
    "too little": (replace(rich(0.5), personal=None), "'personal' is missing"),
    "another mask": (
        replace(rich(0.5), mask=torch.tensor([True])),
        "'mask' is (1,) bool, where (3, 3) bool is expected",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_the_sentence_names_the_place(kind: str) -> None:
    item, why = FAULTS[kind]
    assert refusal(reply(item), Rich, rich(0.0)) == why


# ------------------------------------------------------------------------------------------- every method


@lru_cache(maxsize=1)
def expected_of(federation: Path, name: str) -> tuple[tuple[Any, Packet], ...]:
    """What a method expects in each of its phases, and a reply that is so."""
    study = toy_study(federation, name)
    roster = {site: SiteCard(site, i, SIZES[site][0], ("blob",)) for i, site in enumerate(sorted(SIZES))}
    found = []
    for _, round in timeline(study.method, 3):
        blank = study.method.blank(study.task, roster, roster["ada"], round)
        blank = replace(blank, **{name: _sent(part) for name, part in vars(blank).items()})
        packet = flatten(blank)
        filled = {path: torch.ones(t.shape, dtype=t.dtype) for path, t in packet.tensors.items()}
        found.append((blank, Packet(packet.header, filled)))
    return tuple(found)


def _sent(part: Any) -> Any:
    """What may be left out is sent; a mask is packed bit by bit, and so needs bits."""
    part = part.like if isinstance(part, Maybe) else part
    if isinstance(part, FeatureSums):
        return replace(part, n=1)  # features of no image have no mean
    return torch.zeros(part.shape, dtype=torch.bool) if isinstance(part, Tensor) and part.dtype == torch.bool else part


@pytest.mark.parametrize("name", METHODS)
def test_a_method_knows_a_sound_reply(name: str, federation: Path) -> None:
    for blank, sound in expected_of(federation, name):
        assert refusal(sound, type(blank), blank) == ""


@pytest.mark.parametrize("name", METHODS)
@settings(QUICK, max_examples=20)
@given(data=st.data())
def test_no_method_meets_a_spoilt_reply(name: str, federation: Path, data: st.DataObject) -> None:
    blank, sound = data.draw(st.sampled_from(expected_of(federation, name)))
    spoilt = spoilt_header(sound) | spoilt_tensor(sound) if sound.tensors else spoilt_header(sound)
    assert refusal(data.draw(spoilt), type(blank), blank)


@pytest.mark.slow
def test_no_method_meets_any_of_many_spoilt_replies(federation: Path) -> None:
    """10,000 examples over all methods and phases."""
    replies = [found for name in METHODS for found in expected_of(federation, name)]

    @settings(QUICK, max_examples=10_000)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        blank, sound = data.draw(st.sampled_from(replies))
        spoilt = spoilt_header(sound) | spoilt_tensor(sound) if sound.tensors else spoilt_header(sound)
        assert refusal(data.draw(spoilt), type(blank), blank)

    check()


def test_a_method_must_say_what_it_expects_of_a_mapping(federation: Path) -> None:
    @message
    class Uplink:
        state: State

    method = Counting()
    object.__setattr__(method, "Uplink", Uplink)
    with pytest.raises(TypeError, match=r"Mapping.*the method must say in blank\(\)"):
        method.blank(toy_study(federation).task, {}, SiteCard("ada", 0, 1, ()), ROUND)


def test_a_message_inside_a_message_is_blank_too(federation: Path) -> None:
    @message
    class Inner:
        model: Weights
        steps: int

    @message
    class Uplink:
        inner: Inner
        loss: float

    Uplink.__annotations__["inner"] = Inner
    Inner.__annotations__.update(model=Weights, steps=int)
    method, task = Counting(), toy_study(federation).task
    object.__setattr__(method, "Uplink", Uplink)
    blank = method.blank(task, {}, SiteCard("ada", 0, 1, ()), ROUND)
    assert (blank.inner.model.keys(), blank.inner.steps, blank.loss) == (task.shape().keys(), 0, 0.0)
