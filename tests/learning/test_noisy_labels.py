"""UFPS, Eqs. 5 and 9, voxels that are left out, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from consilium.batch import Batch
from consilium.learning.main_teacher import Refined, refined
from consilium.learning.noisy_labels import left_out, reverse_cross_entropy, reverse_factor
from consilium.learning.pseudo_labels import PseudoLabels
from consilium.networks.plain_unet import Supervised
from consilium.networks.unet import UNet
from consilium.networks.vgg import SmallVGG
from consilium.tasks.segmentation import Segmentation

TASK = Segmentation(("a", "b"), 2, 1, UNet((4, 8), 1), SmallVGG((4,)), loss_name="dice+ce")


# ------------------------------------------------------------------------------------------------ the main teacher


def heard(teacher: list[int], own: tuple[int, ...] = ()) -> PseudoLabels:
    everything = torch.tensor([teacher], dtype=torch.uint8)
    others = torch.tensor([[0 if c in own else c for c in teacher]], dtype=torch.uint8)
    return PseudoLabels(others, everything, torch.zeros(1, len(teacher)))


def refine(teacher: list[int], model: list[int], own: tuple[int, ...] = (), **how: Any) -> Refined:
    mine = torch.tensor([[c in own for c in range(3)]])
    wanted = {"agreement": 0.8, "intersect": True, "guard": False, **how}
    decided = torch.tensor([model], dtype=torch.uint8)
    return refined(heard(teacher, own), decided, mine, **wanted)


def test_where_they_agree_enough_the_intersection_is_the_label() -> None:
    """They share 4 of the model's 5 foreground voxels: ≥ .8. What they disagree on is ignored, not background."""
    labels, ignored = refine([1, 1, 2, 2, 0, 0, 1], [1, 1, 2, 2, 1, 0, 0])
    assert labels.tolist() == [[1, 1, 2, 2, 0, 0, 0]]
    assert ignored.tolist() == [[False, False, False, False, True, False, True]]


def test_else_the_global_model_decides() -> None:
    """They share 3 of 5: below .8."""
    labels, ignored = refine([1, 1, 2, 0, 0, 0, 1], [1, 1, 2, 2, 1, 0, 0])
    assert labels.tolist() == [[1, 1, 2, 2, 1, 0, 0]]
    assert not ignored.any()


def test_agreement_needs_the_same_organ() -> None:
    labels, ignored = refine([2, 2, 2], [1, 1, 1])
    assert labels.tolist() == [[1, 1, 1]] and not ignored.any()


def test_the_global_model_alone_when_asked() -> None:
    labels, ignored = refine([1, 1, 0], [1, 1, 2], intersect=False)
    assert labels.tolist() == [[1, 1, 2]] and not ignored.any()


def test_without_foreground_nothing_is_intersected_away() -> None:
    """|G| = 0: the printed rule takes the empty intersection; teachers' voxels are ignored, or kept by the guard."""
    labels, ignored = refine([1, 1, 0], [0, 0, 0])
    assert labels.tolist() == [[0, 0, 0]] and ignored.tolist() == [[True, True, False]]
    labels, ignored = refine([1, 1, 0], [0, 0, 0], guard=True)
    assert labels.tolist() == [[1, 1, 0]] and not ignored.any()


def test_the_guard_keeps_a_lagging_organ() -> None:
    """The large organ 1 dominates Eq. 5 and the model has lost organ 2: unguarded, 2 has no positive voxel left."""
    teacher, model = [1] * 10 + [2, 2, 2, 0], [1] * 10 + [0, 0, 2, 2]
    labels, ignored = refine(teacher, model)
    assert labels.tolist() == [[1] * 10 + [0, 0, 2, 0]]
    assert ignored.tolist() == [[False] * 10 + [True, True, False, True]]
    labels, ignored = refine(teacher, model, guard=True)  # 1 of 3 found: below .7
    assert labels.tolist() == [teacher]
    assert ignored.tolist() == [[False] * 13 + [True]]


def test_the_guard_also_holds_where_the_model_decides() -> None:
    labels, ignored = refine([2, 2, 2, 0, 0], [1, 0, 2, 2, 1], guard=True)
    assert labels.tolist() == [[2, 2, 2, 0, 1]]
    assert ignored.tolist() == [[False, False, False, True, False]]


def test_claims_on_what_the_site_annotates_are_void() -> None:
    labels, ignored = refine([1, 1, 2, 2], [1, 1, 2, 2], own=(1,), guard=True)
    assert labels.tolist() == [[0, 0, 2, 2]] and not ignored.any()


def test_a_case_without_a_mask_takes_claims_on_all_labels() -> None:
    """The same claims in two cases of a site that annotates label 1, but not in the second."""
    everything = torch.tensor([[1, 1, 2, 0]] * 2, dtype=torch.uint8)
    said = PseudoLabels(torch.tensor([[0, 0, 2, 0], [1, 1, 2, 0]], dtype=torch.uint8), everything, torch.zeros(2, 4))
    decided = torch.tensor([[0, 0, 2, 1]] * 2, dtype=torch.uint8)
    own = torch.tensor([[False, True, False], [False, False, False]])
    guarded, plain = (refined(said, decided, own, 0.3, True, guard) for guard in (True, False))
    assert plain.labels.tolist() == [[0, 0, 2, 0]] * 2
    assert plain.ignored.tolist() == [[False] * 4, [True, True, False, True]]
    # the global model finds none of label 1 where the teachers do: they go on labelling it
    assert guarded.labels.tolist() == [[0, 0, 2, 0], [1, 1, 2, 0]]
    assert guarded.ignored.tolist() == [[False] * 4, [False, False, False, True]]


def test_every_case_decides_for_itself() -> None:
    said = PseudoLabels(*(torch.tensor([[1, 1], [2, 0]], dtype=torch.uint8),) * 2, torch.zeros(2, 2))
    decided = torch.tensor([[1, 1], [1, 1]], dtype=torch.uint8)
    labels, ignored = refined(said, decided, torch.zeros(2, 3, dtype=torch.bool), 0.8, True, False)
    assert labels.tolist() == [[1, 1], [1, 1]] and not ignored.any()


# ------------------------------------------------------------------------------------------------ losses


def batch_of(truth: Tensor) -> Batch:
    return Batch(torch.zeros(len(truth), 1), truth, tuple(f"c{i}" for i in range(len(truth))))


def test_what_is_left_out_has_no_loss_and_no_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(1, 3, 2, 4, generator=generator, requires_grad=True)
    truth = torch.tensor([[[0, 1, 2, 0], [0, 1, 2, 0]]])
    ignored = torch.zeros(1, 2, 4, dtype=torch.bool)
    ignored[0, 1] = True
    quiet = torch.where(ignored, 0, truth)
    half = TASK.loss(output[:, :, :1], batch_of(truth[:, :1]))
    alone = Segmentation(("a", "b"), 2, 1, UNet((4, 8), 1), SmallVGG((4,)), loss_name="dice")
    dice = alone.loss(output[:, :, :1], batch_of(truth[:, :1]))
    loss = TASK.loss(left_out(output, ignored), batch_of(quiet))
    # Dice is that of the voxels that count; cross entropy is a mean over all voxels, of which these add nothing
    assert loss.item() == pytest.approx((dice + (half - dice) / 2).item(), rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None
    assert not output.grad[:, :, 1].any() and output.grad[:, :, 0].all()


def test_an_organ_without_positives_is_hardly_pushed_by_dice() -> None:
    """Why the guard need not take Dice away there: its gradient is a ten-thousandth of a present organ's."""
    alone = Segmentation(("a", "b"), 2, 1, UNet((4, 8), 1), SmallVGG((4,)), loss_name="dice")
    output = torch.zeros(1, 3, 4, 4, requires_grad=True)
    truth = torch.zeros(1, 4, 4, dtype=torch.long)
    truth[0, 0] = 1
    alone.loss(output, batch_of(truth)).backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None
    push = torch.autograd.grad(
        alone.loss(logits := output.detach().requires_grad_(), batch_of(torch.zeros_like(truth))), logits
    )[0]
    assert push.abs().max() < 1e-4 * output.grad.abs().max()


def test_reverse_cross_entropy_by_hand() -> None:
    """−Σ q log p with log 0 taken as log 1e−4: 9.21 times the probability the model gives to other classes."""
    chances = torch.tensor([[0.7, 0.1], [0.2, 0.3], [0.1, 0.6]])[None, :, None]
    truth = torch.tensor([[[0, 1]]])
    expected = -math.log(1e-4) * ((1 - 0.7) + (1 - 0.3)) / 2
    assert reverse_cross_entropy(chances.log(), truth).item() == pytest.approx(expected, rel=1e-5)
    deep = Supervised(chances.log(), ((0.5, chances.log()),))
    assert reverse_cross_entropy(deep, truth).item() == pytest.approx(1.5 * expected, rel=1e-5)


def test_reverse_cross_entropy_is_bounded_and_pulls_to_the_label() -> None:
    output = torch.tensor([[[[-80.0]], [[80.0]]]], requires_grad=True)
    loss = reverse_cross_entropy(output, torch.tensor([[[0]]]))
    assert loss.item() == pytest.approx(-math.log(1e-4))
    even = torch.zeros(1, 2, 1, 1, requires_grad=True)
    reverse_cross_entropy(even, torch.tensor([[[0]]])).backward()  # type: ignore[no-untyped-call]
    assert even.grad is not None and torch.isfinite(even.grad).all()
    assert even.grad[0, 0] < 0 < even.grad[0, 1]  # descending raises the label's logit


def test_the_factor_matters_at_the_end_only() -> None:
    """As in the paper's 500 rounds, times .01: 3.3e−6 after 300, 1.8e−4 after 400, 1e−2 in the last."""
    assert 0.01 * reverse_factor(299, 500) == pytest.approx(3.35e-6, rel=1e-2)
    assert 0.01 * reverse_factor(399, 500) == pytest.approx(1.83e-4, rel=1e-2)
    assert 0.01 * reverse_factor(499, 500) == pytest.approx(0.01)
    assert 0.01 * reverse_factor(299, 500, growth=0.0) == 0.01  # "Fixed" of table S4
