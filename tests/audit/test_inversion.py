"""One update shows images: of a network whose gradient tells them, they are found again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from consilium.analysis.opening import open_run
from consilium.audit.inversion import inversion_figure, invert, matched, search
from consilium.batch import Batch
from consilium.reports.style import to_bytes

pytestmark = pytest.mark.xdist_group("audit")


def test_the_image_behind_a_gradient_is_found() -> None:
    """Two smooth images and a network with a linear layer over all pixels: the gradient's rows are the image."""
    rows = torch.linspace(0, 1, 8)
    image = (rows[:, None] * rows[None]).expand(1, 1, 8, 8).contiguous()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    batch = Batch(image, torch.tensor([2]), ("case",))
    loss = lambda output, batch: nn.functional.cross_entropy(output, batch.truth)  # noqa: E731
    found = search(network, loss, batch, 150, torch.Generator().manual_seed(0))
    other = image.flip(-1)
    result = matched(image, found, [other])
    assert result.likeness[0] > 0.9
    assert result.chance is not None and result.chance < 0.5
    assert torch.equal(found, search(network, loss, batch, 150, torch.Generator().manual_seed(0)))


def test_what_was_found_is_put_beside_the_image_it_is_most_like() -> None:
    images = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    result = matched(images, images[[2, 0, 1]] * 0.5 + 0.1, [])
    assert result.likeness == pytest.approx((1.0, 1.0, 1.0))
    assert torch.allclose(torch.from_numpy(result.found), images * 0.5 + 0.1)
    assert result.chance is None


def test_a_run_is_tried_with_one_image_and_with_eight(memorised: Path) -> None:
    tries = invert(open_run(memorised), steps=2)
    assert [one.batch for one in tries] == [1, 8]
    assert [len(one.likeness) for one in tries] == [1, 8]
    assert to_bytes(inversion_figure(tries), "png").startswith(b"\x89PNG")
