"""In float16 a number below 3e-8 is zero, and one above 65504 is infinite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from consilium.learning.fit import Job, fit
from consilium.learning.gradients import GradientNetwork
from consilium.learning.loss_scaling import gradients_of
from consilium.learning.mixture import Mixture
from tests.learning.small import FIRST, batch, line, site, value


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e3])
def test_gradients_are_those_of_float32(size: float) -> None:
    """size · Σ w x with x = 1, 2: 3 size, of which 1e-9 would be zero, and 2^16 · 1e3 is too large."""
    shown = batch([1.0, 2.0], [0.0, 0.0])
    here = site(shown, precision="float16")

    def loss(output: Tensor) -> Tensor:
        return size * output.float().sum()

    network = GradientNetwork(here, line(4.0))
    gradient, _ = network.gradient(shown, loss)
    assert float(gradient["weight"]) == pytest.approx(3 * size, rel=1e-3)
    mixture = Mixture(network.module, [line(4.0), line(2.0)], 0, [0.5, 0.25])
    with torch.autocast("cpu", dtype=torch.float16):
        value = loss(mixture(shown.images))
    mixture.backward(value, precision="float16")
    assert mixture.p.grad is not None
    assert mixture.p.grad.tolist() == pytest.approx([12 * size, 6 * size], rel=1e-3)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e3])
def test_a_mean_gradient_over_batches_is_that_of_float32(size: float) -> None:
    """That of FedSM's selector: size · Σ w x over x = 1, 2 | 3 has size · (3 · 2 + 3) / 3 = 3 size in the mean."""
    here = site(batch([1.0, 2.0], [0.0, 0.0]), batch([3.0], [0.0]), precision="float16")
    job = Job(line(4.0), loss=lambda output, _: size * output.float().sum(), step=False)
    gradient = fit(here, {"selector": job}, FIRST)["selector"].gradient
    assert gradient is not None and value(gradient) == pytest.approx(3 * size, rel=1e-3)


def test_a_loss_without_a_finite_gradient_has_none() -> None:
    w = torch.tensor([1.0], requires_grad=True)
    (found,) = gradients_of((w * torch.nan).sum(), [w], "float16")
    assert found.isnan().all()
