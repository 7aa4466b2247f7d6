"""CMIDG changes intensities, never places: norms are kept, fields are smooth, draws are seeded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from consilium.learning.cmidg import cmidg, field, gin

SHAPES = [(1, 24, 20), (3, 24, 20), (1, 10, 12, 14)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_gin_keeps_the_frobenius_norm_and_changes_the_image(shape: tuple[int, ...], seed: int) -> None:
    image = drawn(*shape)
    changed = gin(image, seeded(seed))
    assert changed.shape == image.shape
    assert float(changed.norm()) == pytest.approx(float(image.norm()), rel=1e-5)
    assert float((changed - image).norm()) > 0.01 * float(image.norm())


def test_gin_sees_at_most_four_pixels_around() -> None:
    """Four kernels of three: a changed pixel changes nothing farther away but by the common rescaling."""
    image, other = drawn(1, 24, 20), drawn(1, 24, 20)
    other[0, 12, 10] += 3.0
    ratio = gin(other, seeded())[0] / gin(image, seeded())[0]
    near = torch.zeros(24, 20, dtype=torch.bool)
    near[8:17, 6:15] = True
    assert float(ratio[~near].std()) < 1e-4
    assert float(ratio[near].std()) > 1e-3


def test_a_blank_image_stays_finite() -> None:
    assert torch.isfinite(cmidg(torch.zeros(1, 1, 16, 16), seeded())).all()


@pytest.mark.parametrize("shape", [(24, 20), (10, 12, 14), (3, 5)])
def test_a_field_runs_smoothly_from_zero_to_one(shape: tuple[int, ...]) -> None:
    found = field(torch.Size(shape), seeded())
    assert found.shape == shape
    assert (float(found.min()), float(found.max())) == pytest.approx((0.0, 1.0))
    for axis, side in enumerate(shape):  # a cubic B-spline cannot cross its whole range in a tenth of a side
        assert float(found.diff(dim=axis).abs().max()) < 8 / side


@pytest.mark.parametrize("shape", SHAPES)
def test_cmidg_is_seeded_and_leaves_its_input_alone(shape: tuple[int, ...]) -> None:
    images = drawn(2, *shape)
    before = images.clone()
    once, again, otherwise = (cmidg(images, seeded(s)) for s in (0, 0, 1))
    assert torch.equal(once, again) and not torch.equal(once, otherwise)
    assert torch.equal(images, before)
    assert once.stride() == images.stride()


def test_every_image_has_its_own_networks() -> None:
    image = drawn(1, 24, 20)
    one, other = cmidg(torch.stack([image, image]), seeded())
    assert not torch.allclose(one, other)


def test_the_blend_lies_between_the_two_images() -> None:
    """m · a + (1 − m) · b with m in [0, 1], a and b drawn before m."""
    image, generator = drawn(1, 24, 20), seeded()
    one, other = gin(image, generator), gin(image, generator)
    blended = cmidg(image[None], seeded())[0]
    assert (blended >= torch.minimum(one, other) - 1e-5).all()
    assert (blended <= torch.maximum(one, other) + 1e-5).all()
    assert not torch.allclose(blended, one, atol=1e-2) and not torch.allclose(blended, other, atol=1e-2)
