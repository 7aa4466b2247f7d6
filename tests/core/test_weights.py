"""Weights: arithmetic by hand, copies on entry, and a mean that does not depend on who answers first."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from consilium.weights import Weights, join, mean, normalised


def weights(*values: float, count: int = 0) -> Weights:
    """A vector, and an integer buffer beside it."""
    return Weights({"w": torch.tensor(values), "seen": torch.tensor(count)})


def test_arithmetic_is_tensor_by_tensor() -> None:
    x, y = weights(1.0, 2.0), weights(3.0, -4.0)
    assert (x + y)["w"].tolist() == [4.0, -2.0]
    assert (x - y)["w"].tolist() == [-2.0, 6.0]
    assert (0.5 * x)["w"].tolist() == (x * 0.5)["w"].tolist() == [0.5, 1.0]
    assert (x / 4)["w"].tolist() == [0.25, 0.5]
    assert x.zeros()["w"].tolist() == [0.0, 0.0]
    assert x.dot(y) == 3.0 - 8.0
    assert weights(3.0, 4.0).norm() == 5.0
    assert x.numel() == 3


def test_integer_buffers_are_kept_from_the_left() -> None:
    x, y = weights(1.0, count=7), weights(2.0, count=9)
    for result in (x + y, x - y, 3 * x, x / 2, x.zeros(), mean({"a": x, "b": y}, {"a": 1, "b": 1})):
        assert result["seen"].item() == 7
        assert result["seen"].dtype == torch.int64


def test_integers_do_not_count_in_dot_and_norm() -> None:
    assert weights(3.0, 4.0, count=1000).norm() == 5.0


def test_weights_of_different_networks_do_not_mix() -> None:
    with pytest.raises(ValueError, match="different networks"):
        weights(1.0) + Weights({"v": torch.zeros(1)})


def test_weights_are_copies() -> None:
    source = torch.tensor([1.0, 2.0], requires_grad=True)
    held = Weights({"w": source})
    with torch.no_grad():
        source.mul_(100)
    assert held["w"].tolist() == [1.0, 2.0]
    assert not held["w"].requires_grad


def test_nothing_can_be_assigned() -> None:
    with pytest.raises(TypeError):
        weights(1.0)["w"] = torch.zeros(1)  # type: ignore[index]


def test_split_and_join_are_inverse() -> None:
    whole = Weights({"enc.w": torch.ones(2), "dec.w": torch.zeros(3), "dec.b": torch.full((1,), 5.0)})
    decoder, rest = whole.split(lambda name: name.startswith("dec."))
    assert (list(decoder), list(rest)) == (["dec.w", "dec.b"], ["enc.w"])
    joined = join(rest, decoder)
    assert joined.digest == whole.digest


def test_join_refuses_a_name_twice() -> None:
    with pytest.raises(ValueError, match="'w'"):
        join(weights(1.0), Weights({"w": torch.zeros(1)}))


# ------------------------------------------------------------------------------------------------- mean


def test_mean_by_hand() -> None:
    sites = {"a": weights(1.0, 0.0), "b": weights(4.0, 8.0)}
    assert mean(sites, {"a": 3, "b": 1})["w"].tolist() == [1.75, 2.0]  # 3/4 · 1 + 1/4 · 4, 3/4 · 0 + 1/4 · 8


def test_shares_are_over_those_present() -> None:
    """Shares 8, 12, 10 with the last away: 8/20 · 1 + 12/20 · 6 = 4."""
    present = {"ada": weights(1.0), "bea": weights(6.0)}
    assert mean(present, {"ada": 8, "bea": 12, "cid": 10})["w"].item() == pytest.approx(4.0, abs=1e-6)
    assert normalised({"ada": 8, "bea": 12}) == {"ada": 0.4, "bea": 0.6}


@pytest.mark.parametrize("shares", [{"a": 0.0}, {"a": -1.0}, {"a": math.nan}])
def test_shares_must_have_a_positive_sum(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive sum"):
        normalised(shares)


def test_mean_does_not_depend_on_who_answers_first() -> None:
    """0.1 + 0.2 + 0.3 rounds differently from 0.3 + 0.2 + 0.1; in site-name order it is one number, bit by bit."""
    generator = torch.Generator().manual_seed(0)
    sites = {name: Weights({"w": torch.randn(1000, generator=generator)}) for name in ("hk", "bin", "mag", "rim")}
    shares = {"hk": 7, "bin": 11, "mag": 13, "rim": 3}
    digests = {mean({k: sites[k] for k in order}, shares).digest for order in itertools.permutations(sites)}
    assert len(digests) == 1


class Recorded(Mapping[str, Tensor]):
    """Tensors as of a file: made anew at each reading; it records who was read and how many were alive."""

    def __init__(self, site: str, reads: list[tuple[str, str]], alive: list[int], refs: list[Any]) -> None:
        self.site, self.reads, self.alive, self.refs = site, reads, alive, refs

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.full((4,), float(ord(self.site[0])))
        self.reads.append((name, self.site))
        self.refs.append(weakref.ref(tensor))
        self.alive.append(sum(ref() is not None for ref in self.refs))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(("first", "second"))

    def __len__(self) -> int:
        return 2


def test_mean_reads_one_tensor_at_a_time() -> None:
    reads: list[tuple[str, str]] = []
    alive: list[int] = []
    refs: list[Any] = []
    sites = {name: Weights.over(Recorded(name, reads, alive, refs)) for name in ("cid", "ada", "bea", "dot", "eve")}
    mean(sites, dict.fromkeys(sites, 1.0))
    order = ["ada", "bea", "cid", "dot", "eve"]
    assert reads == [(name, site) for name in ("first", "second") for site in order]
    assert max(alive) <= 3  # the first site's, the one being added and the one before it; not one per site


# ----------------------------------------------------------------------------------------------- digest

BASE = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3], dtype=torch.int64)}


def test_equal_weights_have_equal_digests() -> None:
    strided = torch.tensor([[1.0, 9.0], [2.0, 9.0]])[:, 0]  # 1, 2 with a gap between them
    assert Weights(BASE).digest == Weights({**BASE, "a": strided}).digest == Weights.over({**BASE}).digest


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.tensor([1.0, 2.0000002])},
        {"a": torch.tensor([[1.0, 2.0]])},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"b": torch.tensor([4], dtype=torch.int64)},
        {"b": torch.tensor([3], dtype=torch.int32)},
        {"c": torch.zeros(0)},
    ],
    ids=["value", "shape", "type", "integer", "integer-type", "one-more"],
)
def test_unequal_weights_have_other_digests(change: dict[str, Tensor]) -> None:
    assert Weights(BASE).digest != Weights({**BASE, **change}).digest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.uint8])
def test_every_type_has_a_digest(dtype: torch.dtype) -> None:
    zero, one = (Weights({"scalar": torch.tensor(value).to(dtype)}) for value in (0, 1))
    assert zero.digest != one.digest
