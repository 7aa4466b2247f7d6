"""A mixture's two gradients, from one backward pass, are those of autograd through the mixing and of differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from consilium.learning.mixture import Mixture

P = [0.4, -0.2, 0.7]  # not convex: it need not be
OWN = 2
Parts = tuple[nn.Module, list[dict[str, Tensor]], Callable[[Tensor], Tensor], Tensor]  # network, cores, loss, images


def network() -> nn.Module:
    """Convolutions in both memory layouts, every kind of normalisation, a buffer, a hidden layer."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(),
        nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), nn.GroupNorm(2, 6), nn.GELU(),  # type: ignore[call-overload]
        nn.InstanceNorm2d(6, affine=True), nn.Flatten(), nn.Linear(96, 3),
    ).double()  # fmt: skip


@pytest.fixture
def parts() -> Parts:
    torch.manual_seed(0)
    cores = [{name: w.detach().clone() for name, w in network().named_parameters()} for _ in P]
    truth = torch.tensor([0, 2, 1, 1, 0])
    return network(), cores, lambda out: nn.functional.cross_entropy(out, truth), torch.randn(5, 2, 8, 8).double()


def by_autograd(
    module: nn.Module, cores: list[dict[str, Tensor]], loss: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """Core and p as leaves, the mixture in the graph; the core's gradient in a row, then p's."""
    p = torch.tensor(P, dtype=torch.float64, requires_grad=True)
    own = {name: w.clone().requires_grad_() for name, w in cores[OWN].items()}
    models = [own if j == OWN else core for j, core in enumerate(cores)]
    mixed = {name: sum(p[j] * model[name] for j, model in enumerate(models)) for name in own}
    found = torch.autograd.grad(loss(functional_call(module, mixed, (x,))), [*own.values(), p])
    return torch.cat([g.reshape(-1) for g in found])


def test_both_gradients_are_autograds(parts: Parts) -> None:
    module, cores, loss, x = parts
    mixture = Mixture(module, cores, OWN, P)
    mixture.backward(loss(mixture(x)))
    assert mixture.core.grad is not None and mixture.p.grad is not None
    slopes = mixture._parts(mixture.core.grad)
    ours = torch.cat([*(slopes[name].reshape(-1) for name in cores[0]), mixture.p.grad])
    theirs = by_autograd(module, cores, loss, x)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-12
    assert float((ours[-3:] - theirs[-3:]).norm() / theirs[-3:].norm()) < 1e-12


def test_both_gradients_are_slopes_of_the_loss(parts: Parts) -> None:
    """Central differences in every p_j and along random directions of the core."""
    module, cores, loss, x = parts
    mixture = Mixture(module, cores, OWN, P)
    mixture.backward(loss(mixture(x)))
    assert mixture.core.grad is not None and mixture.p.grad is not None
    core_grad, p_grad, h = mixture.core.grad.clone(), mixture.p.grad.clone(), 1e-6
    for vector, slope in ((mixture.p.data, p_grad), (mixture.core.data, core_grad)):
        eye = torch.eye(3) if len(vector) == 3 else torch.randn(4, len(vector))
        for direction in eye.double():
            values = []
            for sign in (1, -1):
                vector += sign * h * direction
                values.append(loss(mixture(x)).item())
                vector -= sign * h * direction
            expected = float(slope @ direction)
            assert (values[0] - values[1]) / (2 * h) == pytest.approx(expected, rel=1e-5)


def test_the_core_is_a_row_of_the_matrix_and_the_others_stay(parts: Parts) -> None:
    module, cores, loss, x = parts
    mixture = Mixture(module, cores, OWN, P)
    for name, w in mixture.core_weights().items():
        assert torch.equal(w, cores[OWN][name])
    before = mixture(x)
    mixture.backward(loss(before))
    torch.optim.SGD([mixture.core], 0.5, fused=True).step()
    assert not torch.equal(mixture(x), before)
    moved = mixture.core_weights()
    step = {name: (cores[OWN][name] - moved[name]) / 0.5 for name in moved}
    assert torch.allclose(torch.cat([s.reshape(-1) for s in step.values()]), by_autograd(module, cores, loss, x)[:-3])
    for j in (0, 1):
        assert all(torch.equal(part, cores[j][name]) for name, part in mixture._parts(mixture._matrix[j]).items())


def test_statistics_are_those_of_the_mixture_itself(parts: Parts) -> None:
    """The running mean moves by a tenth towards what the mixed convolution gives."""
    module, cores, _, x = parts
    mixed = {name: sum(p * core[name] for p, core in zip(P, cores)) for name in ("0.weight", "0.bias")}
    expected = nn.functional.conv2d(x, mixed["0.weight"], mixed["0.bias"]).mean((0, 2, 3))  # type: ignore[arg-type]
    Mixture(module, cores, OWN, P)(x)
    assert torch.allclose(module.get_buffer("1.running_mean"), 0.1 * expected)


def test_clipping_cuts_the_mixtures_gradient_before_it_is_shared_out(parts: Parts) -> None:
    module, cores, loss, x = parts
    mixture = Mixture(module, cores, OWN, P)
    mixture.backward(loss(mixture(x)))
    assert mixture.core.grad is not None and mixture.p.grad is not None
    core, p = mixture.core.grad.clone(), mixture.p.grad.clone()
    length = float(core.norm()) / abs(P[OWN])
    mixture.backward(loss(mixture(x)), clip=length / 4)
    assert torch.allclose(mixture.core.grad, core / 4, rtol=1e-4)
    assert torch.allclose(mixture.p.grad, p / 4, rtol=1e-4)
