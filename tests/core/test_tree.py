"""The serialiser: whatever a message holds comes back, equal messages are equal bytes, and nothing else gets in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from consilium import packet_files, tree
from consilium.contract import digest
from consilium.tree import Packet, PacketError, flatten, message, unflatten
from consilium.weights import Weights


@message
class Inner:
    real: float
    weights: Weights


@message
class Everything:
    whole: int
    real: float
    word: str
    flag: bool
    maybe: float | None
    tensor: Tensor
    mask: Tensor
    global_: Weights
    inner: Inner | None
    several: tuple[float, ...]
    named: Mapping[str, Weights]
    nested: Mapping[str, Inner]


@message
class Small:
    global_: Weights
    steps: int


def small(*values: float, steps: int = 3) -> Small:
    return Small(Weights({"conv.weight": torch.tensor(values), "bias": torch.zeros(1)}), steps)


# ---------------------------------------------------------------------------------------------- round trip

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
names = st.from_regex(r"[a-z][a-z0-9.]{0,6}", fullmatch=True)
real = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def tensors(draw: Any, kinds: list[torch.dtype] = KINDS) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randint(0, 2, shape, generator=generator).to(draw(st.sampled_from(kinds)))


weights = st.dictionaries(names, tensors(), max_size=3).map(Weights)
inner = st.builds(Inner, real, weights)
everything = st.builds(
    Everything,
    whole=st.integers(-(2**62), 2**62),
    real=real,
    word=st.text(max_size=8),
    flag=st.booleans(),
    maybe=st.none() | real,
    tensor=tensors(),
    mask=tensors([torch.bool]),
    global_=weights,
    inner=st.none() | inner,
    several=st.lists(real, max_size=3).map(tuple),
    named=st.dictionaries(names, weights, max_size=3),
    nested=st.dictionaries(names, inner, max_size=2),
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(item=everything)
def test_every_kind_of_field_comes_back(item: Everything) -> None:
    back = unflatten(flatten(item), Everything)
    assert digest(back) == digest(item)
    assert (back.whole, back.real, back.word, back.flag, back.maybe) == (
        item.whole, item.real, item.word, item.flag, item.maybe,
    )  # fmt: skip
    assert back.several == item.several
    assert back.mask.equal(item.mask) and back.mask.dtype == torch.bool
    assert list(back.global_) == list(item.global_)


def test_a_file_brings_everything_back(tmp_path: Path) -> None:
    item = Everything(
        1, 0.1, "hé\n", True, None, torch.eye(2), torch.tensor([True, False, True]), small(1.5).global_,
        Inner(2.0, small(0.5).global_), (1.0, 2.0), {"hk": small(9.0).global_}, {},
    )  # fmt: skip
    packet_files.save(item, tmp_path / "all.safetensors")
    assert digest(packet_files.load(tmp_path / "all.safetensors", Everything)) == digest(item)


def test_a_float_that_is_whole_stays_a_float() -> None:
    assert isinstance(unflatten(flatten(Inner(2, small().global_)), Inner).real, float)


# -------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize("count", [8, 801, 64_000])
def test_masks_take_an_eighth_of_their_bytes(count: int) -> None:
    mask = torch.arange(count) % 3 == 0
    packet = flatten(Small(Weights({"mask": mask}), 0))
    assert packet.tensors["global/mask"].numel() == -(-count // 8)
    assert unflatten(packet, Small).global_["mask"].equal(mask)


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells about mapped files")
def test_forgotten_tensors_of_a_file_take_no_memory_and_come_back(tmp_path: Path) -> None:
    def mapped() -> int:
        smaps = Path("/proc/self/smaps").read_text().split("VmFlags")
        here = [area for area in smaps if str(tmp_path) in area]
        return sum(int(line.split()[1]) for area in here for line in area.splitlines() if line.startswith("Rss:"))

    large = torch.arange(1 << 20, dtype=torch.float32)
    packet_files.save(Inner(0.0, Weights({"large": large, "small": torch.ones(3)})), tmp_path / "x")
    weights = packet_files.load(tmp_path / "x", Inner).weights
    view = weights["large"]
    assert torch.equal(view, large)
    before = mapped()
    weights.forget("large")
    after = mapped()
    assert torch.equal(view, large)
    assert before - after > 4000, f"{before} and {after} kB"


def test_global_is_written_without_its_underscore() -> None:
    assert set(flatten(small(1.0)).tensors) == {"global/conv.weight", "global/bias"}


def test_paths_are_fields_and_names_joined(tmp_path: Path) -> None:
    @message
    class Server:
        global_: Weights
        personal: Mapping[str, Weights]

    item = small(1.0, 2.0).global_
    packet_files.save(Server(item, {"hk": item, "bin": item}), tmp_path / "s.safetensors")
    with safe_open(tmp_path / "s.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == sorted(
            f"{path}/{name}" for path in ("global", "personal/hk", "personal/bin") for name in item
        )
        assert file.get_tensor("personal/hk/conv.weight").tolist() == [1.0, 2.0]
        assert list(file.metadata()) == ["message"]  # with two keys, equal states would not be equal files


def test_two_sites_whose_names_differ_by_a_last_underscore_stay_apart() -> None:
    @message
    class Server:
        personal: Mapping[str, Weights]

    sites = {"hk": Weights({"w": torch.tensor(1.0)}), "hk_": Weights({"w": torch.tensor(2.0)})}
    _, held, _ = tree.split(Server(sites))
    assert len(held) == 2


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    item = Small(Weights({"a": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7), "e": torch.zeros(0, 2)}), 1)
    packet_files.save(item, tmp_path / "x.safetensors")
    read = load_file(tmp_path / "x.safetensors")
    assert read["global/a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read["global/n"].item() == 7
    assert read["global/e"].shape == (0, 2)


def test_equal_messages_are_equal_files(tmp_path: Path) -> None:
    """Whatever the order of a mapping or the memory layout of a tensor."""

    def state(order: list[str], layout: Callable[[Tensor], Tensor]) -> Everything:
        image = layout(torch.arange(16.0).reshape(1, 2, 2, 4))
        one = Weights.over({"w": image, "b": torch.ones(2)})
        inner = Inner(1.0, one)
        named = {name: Weights.over({"w": image + ord(name)}) for name in order}
        return Everything(1, 2.0, "x", False, None, image, image > 3, one, inner, (), named, {})

    first = state(["a", "b", "c"], torch.clone)
    second = state(["c", "a", "b"], lambda t: t.contiguous(memory_format=torch.channels_last))
    packet_files.save(first, tmp_path / "first")
    packet_files.save(second, tmp_path / "second")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert packet_files.to_bytes(packet_files.with_digest(flatten(first))) == (tmp_path / "first").read_bytes()


def test_a_file_backed_message_is_written_again_byte_for_byte(tmp_path: Path) -> None:
    packet_files.save(small(1.0, 2.0), tmp_path / "one")
    packet_files.save(packet_files.load(tmp_path / "one", Small), tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


# --------------------------------------------------------------------------------------------- refused


@message
class Other:
    global_: Weights
    steps: int


def edited(**changes: Any) -> Packet:
    """A packet of `Small` whose shape says something else."""
    packet = flatten(small(1.0))
    head = json.loads(packet.header)
    shape = json.loads(head["message"])
    shape["tree"].update(changes)
    shape["tree"] = {key: value for key, value in shape["tree"].items() if value != "gone"}
    return Packet(json.dumps({**head, "message": json.dumps(shape)}), packet.tensors)


def dropped(name: str) -> Packet:
    header, tensors = flatten(small(1.0))
    return Packet(header, {k: t for k, t in tensors.items() if k != name})


SOUND = flatten(small(1.0))
OTHER_TYPE = '{"type":"os.system","tree":{}}'
BAD: dict[str, tuple[Packet, str]] = {
    "another message": (flatten(Other(small(1.0).global_, 3)), "here is a Other, where a Small is expected"),
    "a missing tensor": (dropped("global/bias"), "no tensor 'global/bias'"),
    "an extra tensor": (Packet(SOUND.header, {**SOUND.tensors, "x": torch.zeros(1)}), "'x'"),
    "a text for a number": (edited(steps="many"), "'steps' should be int, not str"),
    "a truth for a number": (edited(steps=True), "'steps' should be int, not bool"),
    "nothing for a number": (edited(steps=None), "'steps' should be int, not NoneType"),
    "a text for weights": (edited(global_="tensor"), "'global' should be list, not str"),
    "a missing field": (edited(steps="gone"), "should have the fields"),
    "a further field": (edited(command="rm"), "should have the fields"),
    "no JSON": (Packet("{", {}), "header is not valid"),
    "a list": (Packet("[]", {}), "header is not valid"),
    "a header without shape": (Packet('{"message": "1", "masks": {}}', {}), "shape is not valid"),
    "a class by name": (Packet(json.dumps({"message": OTHER_TYPE, "masks": {}}), {}), "os.system"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_packet_of_another_shape_is_refused_in_a_sentence(what: str) -> None:
    packet, words = BAD[what]
    with pytest.raises(PacketError) as error:
        unflatten(packet, Small)
    assert words in str(error.value)


def lying(masks: str) -> Packet:
    header, tensors = flatten(small(1.0))
    return Packet(header.replace('"masks":{}', f'"masks":{masks}'), tensors)


@pytest.mark.parametrize(
    "packet",
    [
        edited(global_=["conv.weight", "bias", 1]),
        lying('{"global/bias":[1]}'),
        lying('{"global/bias":"many"}'),
    ],
    ids=["a name that is no text", "floats called a mask", "a mask without a shape"],
)
def test_a_lying_header_is_refused_in_a_sentence(packet: Packet) -> None:
    with pytest.raises(PacketError):
        digest(unflatten(packet, Small))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _foreign(path: Path) -> None:
    save_file({"w": torch.zeros(2)}, path)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (_cut, "damaged or not a safetensors file"),
    "empty": (lambda path: path.write_bytes(b""), "damaged or not a safetensors file"),
    "no safetensors file": (lambda path: path.write_text("hello, this is a text file"), "damaged or not"),
    "somebody else's safetensors": (_foreign, "consilium did not write it"),
    "gone": (lambda path: path.unlink(), "there is no file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "damaged or not a safetensors file"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_refused_in_a_sentence_with_its_name(how: str, tmp_path: Path) -> None:
    damage, words = DAMAGE[how]
    path = tmp_path / "state.safetensors"
    packet_files.save(small(1.0), path)
    damage(path)
    with pytest.raises(PacketError) as error:
        packet_files.load(path, Small)
    assert words in str(error.value) and "state.safetensors" in str(error.value)


def _flips(path: Path, bits: int) -> Iterator[bytes]:
    """The file with one bit turned over, at every byte."""
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in range(bits):
            turned = bytearray(content)
            turned[place] ^= 1 << (place + bit) % 8
            yield bytes(turned)


@pytest.mark.parametrize("bits", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_no_turned_bit_of_a_kept_file_is_used(bits: int, tmp_path: Path) -> None:
    """Whatever bit of the file turns over, in its header, table or tensors: the message is the one saved or refused."""
    item, path, turned = small(1.5), tmp_path / "state.safetensors", tmp_path / "turned.safetensors"
    packet_files.save(item, path)
    expected, used = digest(item), 0
    for content in _flips(path, bits):
        turned.write_bytes(content)
        with suppress(PacketError):
            used += digest(packet_files.load(turned, Small)) != expected
    assert used == 0


def test_a_file_of_0_1_has_no_digest_and_opens(tmp_path: Path) -> None:
    item = small(1.5)
    packet_files.write(flatten(item), tmp_path / "old.safetensors")
    assert packet_files.digest_of(packet_files.read(tmp_path / "old.safetensors")) is None
    assert digest(packet_files.load(tmp_path / "old.safetensors", Small)) == digest(item)
    packet_files.save(item, tmp_path / "new.safetensors")
    assert packet_files.digest_of(packet_files.read(tmp_path / "new.safetensors"))


def test_a_message_holds_nothing_else() -> None:
    with pytest.raises(TypeError, match="a message cannot hold a ndarray"):
        flatten(Small(np.zeros(3), 1))  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("beside", [False, True])
def test_a_tensor_that_is_a_part_of_another_is_written(beside: bool, tmp_path: Path) -> None:
    """A column of a matrix, one number shown four times: alone or among others of its type."""
    column, shown = torch.arange(6.0).view(3, 2)[:, 0], torch.ones(1).expand(4)
    others = {"z": torch.zeros(2)} if beside else {}
    for tensor in (column, shown):
        packet_files.write(Packet("{}", {"a": tensor, **others}), tmp_path / "x")
        assert load_file(tmp_path / "x")["a"].tolist() == tensor.tolist()


def test_writing_tells_the_size(tmp_path: Path) -> None:
    assert packet_files.write(flatten(small(1.0)), tmp_path / "n") == (tmp_path / "n").stat().st_size
