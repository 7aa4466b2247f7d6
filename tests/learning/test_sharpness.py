"""ASAM's ascent and UFPS's masks (Eqs. 11–14), by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from consilium.learning.sharpness import (
    blank_mask,
    disputed,
    explored,
    flat,
    masked,
    momentum,
    moved,
    perturbation,
    random_perturbation,
    top,
)  # fmt: skip
from consilium.tree import flatten, message, unflatten
from tests.learning.small import Line

WEIGHTS = {"layer.weight": torch.tensor([3.0, -1.0]), "layer.bias": torch.tensor([10.0])}
SLOPE = {"layer.weight": torch.tensor([1.0, 2.0]), "layer.bias": torch.tensor([2.0])}


def bits(text: str) -> Tensor:
    return torch.tensor([letter == "1" for letter in text])


def written(mask: Tensor) -> str:
    return "".join("1" if bit else "0" for bit in mask)


def test_the_ascent_by_hand() -> None:
    """η = 1: T = (4, 2) on weights and 1 on the bias, whatever it is; T g = (4, 4, 2), ‖T g‖ = 6; ε = .6 T² g / 6."""
    found = perturbation(WEIGHTS, SLOPE, rho=0.6, eta=1.0)
    assert found["layer.weight"].tolist() == pytest.approx([1.6, 0.8])
    assert found["layer.bias"].tolist() == pytest.approx([0.2])


def test_the_ascent_is_where_the_loss_is_largest_within_asams_ball() -> None:
    """The closed form: of all ε with ‖ε / T‖ = ρ, none has a larger ⟨g, ε⟩, which is ρ ‖T g‖."""
    found = flat(perturbation(WEIGHTS, SLOPE, rho=0.7, eta=0.001))
    scale, slope = torch.tensor([3.001, 1.001, 1.0]), flat(SLOPE)
    assert float((found / scale).norm()) == pytest.approx(0.7)
    assert float(found @ slope) == pytest.approx(0.7 * float((scale * slope).norm()))
    others = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    others = scale * (0.7 * others / others.norm(dim=1, keepdim=True))
    assert float((others @ slope).max()) <= float(found @ slope)


def test_a_rescaled_network_is_moved_alike() -> None:
    """ASAM's reason: w → c w makes g → g / c and ε → c ε (η = 0)."""
    (name, weight), slope = next(iter(WEIGHTS.items())), SLOPE["layer.weight"]
    plain = perturbation({name: weight}, {name: slope}, rho=0.5, eta=0.0)[name]
    rescaled = perturbation({name: 8 * weight}, {name: slope / 8}, rho=0.5, eta=0.0)[name]
    assert torch.allclose(rescaled, 8 * plain)


def test_no_slope_moves_nothing() -> None:
    still = perturbation(WEIGHTS, {name: torch.zeros_like(g) for name, g in SLOPE.items()}, rho=0.7, eta=0.001)
    assert flat(still).tolist() == [0, 0, 0]


def test_random_perturbation_is_as_long_and_points_elsewhere() -> None:
    ascent = {"weight": torch.randn(50, 40, generator=torch.Generator().manual_seed(1))}
    found = random_perturbation(ascent, torch.Generator().manual_seed(0))["weight"]
    assert float(found.norm()) == pytest.approx(float(ascent["weight"].norm()))
    assert abs(float((found * ascent["weight"]).sum())) < 0.1 * float(found.norm()) ** 2
    assert torch.equal(found, random_perturbation(ascent, torch.Generator().manual_seed(0))["weight"])


def test_a_moved_network_comes_back_bit_by_bit_with_its_statistics() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    by = {name: torch.full_like(p, 0.1) for name, p in network.named_parameters()}
    with moved(network, by):
        assert torch.equal(network[0].weight, before["0.weight"] + 0.1)
        network(torch.randn(5, 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([1, 5, 3, 4, 2], 0.4, "01010"),
        ([1, 5, 3, 4, 2], 0.5, "01010"),  # ⌊2.5⌋
        ([1, 1, 1, 1, 0], 0.6, "11100"),  # exactly three, though four are equal
        ([2, 1, 2, 1, 1], 0.6, "11100"),
        ([1, 2, 3, 4, 5], 0.1, "00000"),
        ([1, 2, 3, 4, 5], 1.0, "11111"),
    ],
)
def test_top_takes_exactly_its_share(values: list[float], share: float, expected: str) -> None:
    assert written(top(torch.tensor(values, dtype=torch.float32), share)) == expected


def test_top_is_global_not_per_tensor() -> None:
    slopes = {"a": torch.tensor([[9.0, -8.0], [7.0, 6.0]]), "b": torch.tensor([1.0])}
    assert written(top(flat(slopes).abs(), 0.6)) == "11100"


def test_momentum_of_magnitudes_by_hand() -> None:
    """α = .9: .1·(2, 4) = (.2, .4), then .9·(.2, .4) + .1·(2, 0) = (.38, .36): signs do not cancel."""
    first = momentum(None, torch.tensor([2.0, -4.0]), 0.9)
    assert first.tolist() == pytest.approx([0.2, 0.4])
    assert momentum(first, torch.tensor([-2.0, 0.0]), 0.9).tolist() == pytest.approx([0.38, 0.36])


def test_disputed_is_chosen_by_some_but_not_all() -> None:
    masks = {"ada": bits("11100"), "bea": bits("11010"), "cid": bits("10010")}
    assert written(disputed(masks)) == "01110"
    assert written(disputed({name: masks[name] for name in ("ada", "bea")})) == "00110"  # of those that answered
    assert written(masks["ada"]) == "11100"


def test_with_one_site_nothing_is_disputed() -> None:
    assert not disputed({"ada": bits("11010")}).any()


@pytest.mark.parametrize(("share", "count"), [(0.1, 10), (0.255, 25), (0.5, 40)])
def test_explored_lies_in_the_disputed_outside_the_local_and_is_as_many_as_allowed(share: float, count: int) -> None:
    """d = 100, M_L the first 40, M_G the 60 from 20 on: 40 candidates, ⌊T_G · 100⌋ of them or all."""
    place = torch.arange(100)
    local, contested = place < 40, (place >= 20) & (place < 80)
    found = explored(local, contested, share, torch.Generator().manual_seed(0))
    assert int(found.sum()) == count
    assert not (found & local).any() and not (found & ~contested).any()


def test_explored_is_drawn_at_random() -> None:
    """Every candidate is drawn about equally often: 10 of 40, 400 times, is 100 ± 5 standard deviations."""
    local, contested = torch.arange(100) < 60, torch.ones(100, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    counts = sum(explored(local, contested, 0.1, generator).int() for _ in range(400))
    assert isinstance(counts, Tensor)
    assert (counts[60:] - 100).abs().max() < 5 * math.sqrt(400 * 0.25 * 0.75)


def test_the_masked_ascent_of_equation_14_is_cut_after_its_norm() -> None:
    """ε from the whole gradient, then zero outside M_L ∪ M_E: the rest is not made longer for it."""
    ascent = perturbation(WEIGHTS, SLOPE, rho=0.6, eta=1.0)  # (1.6, .8), (.2)
    sparse = masked(ascent, bits("100") | bits("001"))
    assert flat(sparse).tolist() == pytest.approx([1.6, 0.0, 0.2])
    assert flat(ascent).tolist() == pytest.approx([1.6, 0.8, 0.2])


@message
class Carried:
    mask: Tensor


def test_a_mask_travels_at_one_bit_per_parameter() -> None:
    mask = torch.rand(64_000, generator=torch.Generator().manual_seed(0)) < 0.4
    packet = flatten(Carried(mask))
    assert sum(t.numel() * t.element_size() for t in packet.tensors.values()) == 64_000 * 4 / 32
    assert torch.equal(unflatten(packet, Carried).mask, mask)


def test_the_blank_mask_has_one_place_per_parameter() -> None:
    assert blank_mask(Line(3)).shape == (3,)
    assert blank_mask(Line(3)).dtype == torch.bool
