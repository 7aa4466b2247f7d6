"""Every message type at the door it comes in by, and files too: what is not as declared is refused, and nothing else.

The slow tier takes 10,000 examples of each.
"""

from __future__ import annotations

import copy
import json
import math
import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consilium import messages, packet_files, tree
from consilium.data.profile import DataProfile
from consilium.intake import scored
from consilium.messages import AnswerHead, Members, Request, ScoredModel, ScoreSheet, Seal, SiteFacts
from consilium.score_sheets import WHOLE, Score, Scorer, make_sheet
from consilium.site import Round, SiteCard
from consilium.tree import PacketError
from consilium.weights import Weights
from consilium.wires.flare import OrderHead, read_answer
from consilium.wires.local_sites import LocalAnswer, LocalRequest

ROUND = Round(4, "train", 4, 9)
CARD = SiteCard("ada", 0, 8, ("disc", "cup"), 2)
SPAN = (0.5, 2.0)
PROFILE = DataProfile(8, (SPAN, SPAN), (SPAN,), ("RAS", ""), ("float32",), SPAN, SPAN, (SPAN, SPAN, SPAN))
FACTS = SiteFacts(8, 2, ("disc",), 14, {"valid": 3, "test": 3}, "ab12", "ada-ff", "0.1.0", "1234abcd", "99ff", PROFILE)
REQUEST = Request(
    "train",
    "fedavg-s0-1",
    "fedavg",
    ROUND,
    3,
    (1, 2),
    True,
    "{}",
    "{}",
    {"global/a": "ab" * 16},
    PROFILE,
    Seal("ab=", "cd"),
)
SOUND: dict[str, Any] = {
    "request": REQUEST,
    "ordered": OrderHead("0f" * 16, 60.0, REQUEST),
    "members": Members({"ada": CARD, "(pooled)": replace(CARD, name="(pooled)")}),
    "answer": AnswerHead("", 1.5, 300.0, FACTS),
    "facts": FACTS,
    "local request": LocalRequest("/runs/r", "ada", REQUEST, "o", "r"),
    "local answer": LocalAnswer(AnswerHead("failed"), "why", log="file"),
}
MODEL = ScoredModel("global", "", "merged")
SHEET = make_sheet(
    [
        Score(MODEL, "valid", "a", WHOLE, "disc", "dice", 0.5),
        Score(ScoredModel("personal", "ada", "trained"), "test", "b", 3, "cup", "slice_dice", 0.25),
        Score(MODEL, "test", "", WHOLE, "", "auc", 1.0),
    ]
)
SCORER = Scorer("ada", False, {"valid": 3, "test": 3}, frozenset({"ada", "bea"}), frozenset({"disc", "cup"}))


def examples(number: int) -> settings:
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


TIERS = [100, pytest.param(10_000, marks=pytest.mark.slow)]

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../../x", "a/b", "\0", "x" * 5000, "NaN", "tensor", "(pooled)", "pooled", "1e999"]),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=5), parts, max_size=4),
    max_leaves=10,
)


def places(part: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    whole = copy.deepcopy(whole)
    parent = whole
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return whole


def read(kind: type, text: str) -> Any:
    """What the door says: a message, or None for a refusal in a sentence; any other exception is a failure."""
    try:
        return tree.from_text(text, kind)
    except PacketError as error:
        why = str(error)
    assert len(why) < 2000
    return None


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_message_comes_back(name: str) -> None:
    assert tree.from_text(tree.to_text(SOUND[name]), type(SOUND[name])) == SOUND[name]


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("name", SOUND)
def test_whatever_a_message_holds_is_as_declared_or_refused(name: str, number: int) -> None:
    """One place of the message is anything: if it is let through, it reads back as the very same message."""
    kind, whole = type(SOUND[name]), json.loads(tree.to_text(SOUND[name]))
    spots = list(places(whole))

    @examples(number)
    @given(st.sampled_from(spots), values)
    def check(spot: tuple[Any, ...], value: Any) -> None:
        found = read(kind, json.dumps(changed(whole, spot, value)))
        if found is not None:
            assert tree.from_text(tree.to_text(found), kind) == found
            assert all(math.isfinite(v) for v in numbers(found))

    check()


def numbers(item: Any) -> Iterator[float]:
    if isinstance(item, dict):
        for part in item.values():
            yield from numbers(part)
    elif isinstance(item, tuple):
        for part in item:
            yield from numbers(part)
    elif hasattr(item, "__dataclass_fields__"):
        for field in fields(item):
            yield from numbers(getattr(item, field.name))
    elif isinstance(item, (int, float)):
        yield float(item)


@pytest.mark.parametrize("number", TIERS)
def test_any_text_is_refused_without_a_traceback(number: int) -> None:
    sound = tree.to_text(SOUND["ordered"])

    @examples(number)
    @given(st.text(max_size=200) | st.integers(0, len(sound)).map(lambda cut: sound[:cut]) | st.just("[" * 100_000))
    def check(text: str) -> None:
        assert text == sound or read(OrderHead, text) is None
        assert read_answer(text, b"").head.error in ("damaged", "")

    check()


def test_a_long_list_is_refused_before_it_is_built() -> None:
    whole = json.loads(tree.to_text(REQUEST))
    whole["tree"]["wanted"] = [0] * 400_000
    text = json.dumps(whole)
    tracemalloc.start()
    assert read(Request, text) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * len(text)  # the text's own JSON, and nothing on top


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"seconds": NaN}', "'seconds' is nan, not from 0 to 1e+09"),
        ('{"seconds": "1"}', "'seconds' should be float, not str"),
        ('{"memory_mb": -1}', "'memory_mb' is -1.0, not from 0"),
        ('{"error": "whatever it likes to say"}', "'error' cannot be 'whatever it likes to say'"),
        ('{"card": {"n": -30}}', "'card/n' is -30, not from 0"),
        ('{"card": {"n": 1e15}}', "'card/n' should be int, not float"),
        ('{"card": {"n": 9007199254740993000}}', "'card/n' is 9007199254740993000, not from 0"),
        ('{"card": {"name": "bea"}}', "'card' should have the fields"),
        ('{"card": {"scored": {"train": 3}}}', "'card/scored' cannot be 'train'"),
    ],
)
def test_the_sentence_names_the_place(text: str, why: str) -> None:
    whole = json.loads(tree.to_text(SOUND["answer"]))
    for key, value in json.loads(text).items():
        whole["tree"][key] = {**whole["tree"][key], **value} if isinstance(value, dict) else value
    with pytest.raises(PacketError) as error:
        tree.from_text(json.dumps(whole), AnswerHead)
    assert str(error.value).startswith(why)


def test_a_missing_key_is_refused() -> None:
    for name, sound in SOUND.items():
        whole = json.loads(tree.to_text(sound))
        for key in whole["tree"]:
            less = {**whole, "tree": {k: v for k, v in whole["tree"].items() if k != key}}
            assert read(type(sound), json.dumps(less)) is None, (name, key)


def declared(kind: type, seen: set[type]) -> Iterator[str]:
    """The fields of a message, and of those within it, that take any value at all."""
    if kind in seen:
        return
    seen.add(kind)
    for name, hint in get_type_hints(kind, include_extras=True).items():
        yield from _open(hint, f"{kind.__name__}.{name}", seen)


def _open(hint: Any, path: str, seen: set[type]) -> Iterator[str]:
    if get_origin(hint) is Annotated:
        inner = get_args(hint)[0]
        for part in get_args(inner):
            if part is not Ellipsis:
                yield from _open(part, path, seen)
    elif get_args(hint):
        for part in get_args(hint):
            yield from _open(part, path, seen)
    elif hasattr(hint, "__dataclass_fields__"):
        yield from declared(hint, seen)
    elif hint not in (bool, type(None)):
        yield path


def test_every_field_that_crosses_declares_its_range() -> None:
    kinds = [OrderHead, Request, Members, AnswerHead, ScoreSheet, SiteFacts, ScoredModel]
    seen: set[type] = set()
    assert [path for kind in kinds for path in declared(kind, seen)] == []
    assert {SiteCard, Round} <= seen
    own = {item for item in vars(messages).values() if isinstance(item, type) and item.__module__ == messages.__name__}
    crossing = {kind for kind in own if kind.__name__ not in ("Envelope", "Reply", "RollCall")}  # the server's own
    assert crossing <= seen


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("number", TIERS)
def test_a_damaged_file_is_refused_or_reads_as_some_sheet(number: int, tmp_path: Path) -> None:
    """Bytes flipped, cut, doubled or put in, headers and lengths included: never a traceback."""
    sound = packet_files.to_bytes(tree.flatten(SHEET))
    head = 8 + int.from_bytes(sound[:8], "little")
    path = tmp_path / "sheet.safetensors"

    @examples(number)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        way = data.draw(st.sampled_from(["flip", "cut", "insert", "length", "header"]))
        where = data.draw(st.integers(0, len(sound) - 1))
        if way == "flip":
            body = sound[:where] + bytes([sound[where] ^ data.draw(st.integers(1, 255))]) + sound[where + 1 :]
        elif way == "cut":
            body = sound[:where]
        elif way == "insert":
            body = sound[:where] + data.draw(st.binary(max_size=20)) + sound[where:]
        elif way == "length":
            body = data.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little") + sound[8:]
        else:
            words = ["F32", "F8_E4M3", "BOOL", "U64", "I128", "[]", "-1", "9" * 30, "null", "NaN", "{}"]
            word = data.draw(st.sampled_from(words)).encode()
            table = sound[8:head]
            spot = data.draw(st.integers(0, len(table)))
            table = table[:spot] + word + table[spot + len(word) :]
            body = len(table).to_bytes(8, "little") + table + sound[head:]
        path.write_bytes(body)
        try:
            packet = packet_files.read(path)
        except PacketError:
            return
        rows, why = scored(packet, SCORER, ROUND)
        assert (rows is None) == bool(why)

    check()


HEADERS = {
    "a type nobody knows": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]},
    "numbers of another length": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
    "more than there is": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
    "an offset below nothing": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_that_is_not_true_is_refused(kind: str, tmp_path: Path) -> None:
    table = json.dumps({"__metadata__": {"message": "{}"}, "a": HEADERS[kind]}).encode()
    path = tmp_path / "file.safetensors"
    path.write_bytes(len(table).to_bytes(8, "little") + table + bytes(4))
    with pytest.raises(PacketError):
        packet_files.read(path)


def test_a_name_that_is_there_twice_is_refused_or_read_as_checked(tmp_path: Path) -> None:
    """The library and this package could each believe another of the two."""
    one, two = (
        '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}',
        '"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}',
    )
    for first, second in ((one, two), (two, one)):
        table = f'{{"__metadata__":{{"message":"{{}}"}},{first},{second}}}'.encode()
        path = tmp_path / "file.safetensors"
        path.write_bytes(len(table).to_bytes(8, "little") + table + bytes(4))
        try:
            packet = packet_files.read(path)
        except PacketError:
            continue
        assert packet.tensors["a"].shape == (1,)


@pytest.mark.parametrize("number", [50, pytest.param(10_000, marks=pytest.mark.slow)])
def test_reading_rubbish_again_and_again_does_not_grow(number: int, tmp_path: Path) -> None:
    """Neither Python's own memory nor, over many, that of the process: a map or a file left open would show there."""
    path = tmp_path / "file.safetensors"
    path.write_bytes(os.urandom(1 << 20))
    sound = tree.flatten(SHEET)

    def once() -> None:
        for _ in range(number):
            with pytest.raises(PacketError):
                packet_files.read(path)
            assert scored(sound._replace(header="{" * 1000), SCORER, ROUND)[0] is None
            read(Request, tree.to_text(REQUEST)[:-3])

    once()
    if number > 1000:
        process = psutil.Process()
        resident, files = process.memory_info().rss, process.num_fds()
        once()
        assert process.memory_info().rss - resident < 10 << 20
        assert process.num_fds() == files
        return
    tracemalloc.start()
    once()
    first = tracemalloc.get_traced_memory()[0]
    once()
    grown = tracemalloc.get_traced_memory()[0] - first
    tracemalloc.stop()
    assert grown < 50_000


# ------------------------------------------------------------------------------------------ score sheets


def test_a_sheet_becomes_rows_that_the_server_signs() -> None:
    rows, why = scored(tree.flatten(SHEET), SCORER, ROUND)
    assert why == ""
    assert rows is not None
    assert [(row.round, row.phase, row.site, row.outside) for row in rows] == [(5, "train", "ada", False)] * 3
    assert [(row.model, row.of, row.split, row.case, row.label, row.metric, row.value) for row in rows] == [
        ("global", "", "valid", "a", "disc", "dice", 0.5),
        ("personal", "ada", "test", "b#003", "cup", "slice_dice", 0.25),
        ("global", "", "test", "", "", "auc", 1.0),
    ]


@pytest.mark.parametrize("number", TIERS)
def test_scores_are_possible_or_refused(number: int) -> None:
    @examples(number)
    @given(
        st.lists(st.lists(st.integers(-2, 4), min_size=6, max_size=6), max_size=6),
        st.lists(st.floats() | st.floats(0, 1), max_size=6),
    )
    def check(table: list[list[int]], found: list[float]) -> None:
        rows = torch.tensor(table, dtype=torch.int32).reshape(-1, 6)
        sheet = replace(SHEET, rows=rows, values=torch.tensor(found, dtype=torch.float64))
        taken, why = scored(tree.flatten(sheet), SCORER, ROUND)
        assert (taken is None) == bool(why)
        for row in taken or ():
            assert 0 <= row.value <= 1
            assert row.site == "ada"

    check()


def test_a_sheet_of_other_types_is_refused() -> None:
    for change in ({"rows": SHEET.rows.long()}, {"rows": SHEET.rows[:, :5]}, {"values": SHEET.values.float()}):
        assert scored(tree.flatten(replace(SHEET, **change)), SCORER, ROUND)[0] is None
    other = tree.flatten(Weightless(Weights({})))
    assert scored(other, SCORER, ROUND) == (None, "here is a Weightless, where a ScoreSheet is expected")


@tree.message
class Weightless:
    weights: Weights
