"""Segmentation: losses, decisions and scores by hand, for exclusive and for overlapping labels, in 2-D and 3-D."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from consilium.batch import Batch
from consilium.networks.plain_unet import Supervised
from consilium.networks.unet import UNet
from consilium.networks.vgg import SmallVGG
from consilium.tasks.overlap import SCORES, cleaned, overlap
from consilium.tasks.segmentation import Segmentation


def task(contains: dict[str, tuple[str, ...]] | None = None, **changes: Any) -> Segmentation:
    facts: dict[str, Any] = {
        "labels": ("disc", "cup"), "dimensions": 2, "channels": 1, "model": UNet((4, 8), 1), "selector": SmallVGG((4,)),
        "contains": contains or {}, **changes,
    }  # fmt: skip
    return Segmentation(**facts)


NESTED = {"disc": ("cup",)}
MASK = torch.tensor([[0, 1, 1, 2]])  # background, disc, disc, cup


def marks(found: Segmentation, output: Tensor, truth: Tensor, full: bool = True) -> dict[tuple[str, str], float]:
    return {(mark.label, mark.metric): mark.value for mark in found.score(output, truth, full)}


def logits(mask: Tensor) -> Tensor:
    """What a perfectly sure network says of a mask of exclusive labels."""
    return torch.nn.functional.one_hot(mask.long(), 3).movedim(-1, 0) * 20.0 - 10.0


# ------------------------------------------------------------------------------------------------ channels


def test_a_label_includes_what_it_contains() -> None:
    disc, cup = task(NESTED).channels_of(MASK[None])[0]
    assert disc.tolist() == [[False, True, True, True]]
    assert cup.tolist() == [[False, False, False, True]]


def test_exclusive_labels_do_not() -> None:
    disc, cup = task().channels_of(MASK[None])[0]
    assert disc.tolist() == [[False, True, True, False]]
    assert cup.tolist() == [[False, False, False, True]]


def test_a_label_includes_what_lies_deeper() -> None:
    deep = task({"body": ("organ",), "organ": ("tumour",)}, labels=("body", "organ", "tumour"))
    body, _, _ = deep.channels_of(torch.tensor([[[0, 1, 2, 3]]]))[0]
    assert body.tolist() == [[False, True, True, True]]


def test_outputs_of_the_network() -> None:
    """Exclusive labels have a background channel, overlapping ones none."""
    image = torch.rand(1, 1, 8, 8)
    assert task().network()(image).shape[1] == 3
    assert task(NESTED).network()(image).shape[1] == 2
    assert task().network("teacher", labels=["cup"])(image).shape[1] == 2
    assert task().network("selector", labels=["a", "b", "c", "d"])(image).shape == (1, 4)


# ------------------------------------------------------------------------------------------------ loss


def test_the_loss_of_overlapping_labels_by_hand() -> None:
    """Soft Dice of probabilities .9 .8 .6 .2 against 0 1 1 1, and of .1 .1 .1 .7 against 0 0 0 1; mean of both."""
    chances = torch.tensor([[[0.9, 0.8, 0.6, 0.2]], [[0.1, 0.1, 0.1, 0.7]]])
    disc = 1 - 2 * (0.8 + 0.6 + 0.2) / ((0.9 + 0.8 + 0.6 + 0.2) + 3)
    cup = 1 - 2 * 0.7 / (1.0 + 1)
    loss = task(NESTED).loss(torch.logit(chances)[None], Batch(torch.zeros(1), MASK[None], ("c",)))
    assert loss.item() == pytest.approx((disc + cup) / 2, abs=1e-4)


def test_the_loss_of_exclusive_labels_by_hand() -> None:
    """Softmax over background, disc, cup; the background does not count."""
    chances = torch.tensor([[[0.7, 0.2, 0.1, 0.0]], [[0.2, 0.5, 0.6, 0.1]], [[0.1, 0.3, 0.3, 0.9]]])
    disc = 1 - 2 * (0.5 + 0.6) / ((0.2 + 0.5 + 0.6 + 0.1) + 2)
    cup = 1 - 2 * 0.9 / ((0.1 + 0.3 + 0.3 + 0.9) + 1)
    output = chances.clamp_min(1e-9).log()[None]
    loss = task().loss(output, Batch(torch.zeros(1), MASK[None], ("c",)))
    assert loss.item() == pytest.approx((disc + cup) / 2, abs=1e-4)
    ground = 1 - 2 * 0.7 / ((0.7 + 0.2 + 0.1) + 1)
    with_ground = task(dice_background=True).loss(output, Batch(torch.zeros(1), MASK[None], ("c",)))
    assert with_ground.item() == pytest.approx((ground + disc + cup) / 3, abs=1e-4)


def test_cross_entropy_can_be_added() -> None:
    output, batch = logits(MASK)[None] / 10, Batch(torch.zeros(1), MASK[None], ("c",))
    plain, both = (task(loss_name=name).loss(output, batch).item() for name in ("dice", "dice+ce"))
    entropy = torch.nn.functional.cross_entropy(output, MASK[None].long()).item()
    assert both == pytest.approx(plain + entropy, abs=1e-5)


# ------------------------------------------------------------------------------------------------ partial truths

CHANCES = torch.tensor([[[0.7, 0.2, 0.1, 0.0]], [[0.2, 0.5, 0.6, 0.1]], [[0.1, 0.3, 0.3, 0.9]]])
DISC_SEEN = torch.tensor([[0, 1, 1, 0]])  # the cup is hidden


def partial_batch(truth: Tensor, *labels: tuple[str, ...]) -> Batch:
    return Batch(torch.zeros(1), truth, tuple("c" * len(labels)), labels=labels)


def test_what_is_not_shown_is_neither_learned_nor_unlearned() -> None:
    """Only the disc is annotated: Dice of the disc, and background or cup are one class for the cross-entropy."""
    output = CHANCES.clamp_min(1e-9).log()[None]
    batch = partial_batch(DISC_SEEN[None], ("disc",))
    disc = 1 - 2 * (0.5 + 0.6) / ((0.2 + 0.5 + 0.6 + 0.1) + 2)
    assert task().loss(output, batch).item() == pytest.approx(disc, abs=1e-4)
    entropy = -sum(math.log(p) for p in (0.8, 0.5, 0.6, 0.9)) / 4
    assert task(loss_name="dice+ce").loss(output, batch).item() == pytest.approx(disc + entropy, abs=1e-4)


def test_what_is_not_shown_called_background_is_unlearned() -> None:
    """The disc's Dice as above, the cup's of an empty mask, and every voxel that is not disc is background."""
    output = CHANCES.clamp_min(1e-9).log()[None]
    naive = task(loss_name="dice+ce", unannotated="background")
    shown = naive.loss(output, partial_batch(DISC_SEEN[None], ("disc",)))
    assert shown.item() == naive.loss(output, partial_batch(DISC_SEEN[None], ("disc", "cup"))).item()


def test_what_is_not_shown_can_be_ignored() -> None:
    """Dice and cross-entropy of the disc's own logit alone; at prediction background is where no logit is positive."""
    output = torch.tensor([[9.0, 9.0, 9.0, 9.0], [-1.0, 2.0, 0.5, -3.0], [7.0, 7.0, 7.0, 7.0]])[
        None, :, None
    ].requires_grad_()
    alone = task(loss_name="dice+ce", unannotated="ignored")
    loss = alone.loss(output, partial_batch(DISC_SEEN[None], ("disc",)))
    p = [1 / (1 + math.exp(-z)) for z in (-1.0, 2.0, 0.5, -3.0)]
    dice = 1 - 2 * (p[1] + p[2]) / (sum(p) + 2)
    entropy = -(math.log(1 - p[0]) + math.log(p[1]) + math.log(p[2]) + math.log(1 - p[3])) / 4
    assert loss.item() == pytest.approx(dice + entropy, abs=1e-4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None and not output.grad[:, 0].any() and not output.grad[:, 2].any()
    assert not alone.infer(alone.initial(), torch.rand(1, 1, 8, 8))[:, 0].any()


def test_overlapping_labels_that_are_not_shown_have_no_loss() -> None:
    output = torch.rand(1, 2, 1, 4, requires_grad=True)
    task(NESTED).loss(output, partial_batch(DISC_SEEN[None], ("disc",))).backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None
    assert output.grad[:, 0].any() and not output.grad[:, 1].any()


def test_cases_of_one_batch_may_show_different_labels() -> None:
    """Pooled sites: the mean over cases of what each would give alone."""
    output = torch.randn(3, 3, 1, 4, generator=torch.Generator().manual_seed(0))
    truths, shown = torch.stack([DISC_SEEN, MASK, DISC_SEEN]), (("disc",), ("disc", "cup"), ("disc",))
    one = task(loss_name="dice+ce")
    apart = one.loss(output[[0, 2]], partial_batch(truths[[0, 2]], shown[0], shown[2]))
    whole = one.loss(output[1:2], partial_batch(truths[1:2], shown[1]))
    together = one.loss(output, partial_batch(truths, *shown))
    assert together.item() == pytest.approx((2 * apart.item() + whole.item()) / 3, rel=1e-6)


def test_a_network_of_one_label_learns_from_a_truth_that_shows_it() -> None:
    """A teacher of the cup has background and cup; the disc's voxels are background to it."""
    output = torch.tensor([[[0.9, 0.8, 0.7, 0.4]], [[0.1, 0.2, 0.3, 0.6]]]).log()[None]
    cup = 1 - 2 * 0.6 / ((0.1 + 0.2 + 0.3 + 0.6) + 1)
    batch = partial_batch(MASK[None], ("disc", "cup"))
    assert task().loss(output, batch, labels=("cup",)).item() == pytest.approx(cup, abs=1e-4)
    with pytest.raises(ValueError, match="nothing to learn from"):
        task().loss(output, partial_batch(DISC_SEEN[None], ("disc",)), labels=("cup",))


def test_heads_inside_add_their_weight() -> None:
    batch = Batch(torch.zeros(1), MASK[None], ("c",))
    main, aside = logits(MASK)[None] / 10, logits(1 - MASK.clamp_max(1))[None] / 10
    alone = [task().loss(output, batch).item() for output in (main, aside)]
    both = task().loss(Supervised(main, ((0.25, aside), (0.5, aside))), batch).item()
    assert both == pytest.approx(alone[0] + 0.75 * alone[1], rel=1e-6)


@pytest.mark.parametrize("name", ["dice", "dice+ce"])
@pytest.mark.parametrize("how", [{}, {"contains": NESTED}, {"unannotated": "ignored"}, {"unannotated": "background"}])
def test_cases_that_count_differently(name: str, how: dict[str, Any]) -> None:
    """Σ_j w_j L_j / B: each case as if it were alone, with heads inside and with labels that some do not show."""
    one = task(loss_name=name, **how)
    outputs = torch.randn(2, 3, 2 if one.overlapping else 3, 1, 4, generator=torch.Generator().manual_seed(1))
    outputs.requires_grad_()
    truths, shown = torch.stack([DISC_SEEN, MASK, MASK]), (("disc",), ("disc", "cup"), ("disc", "cup"))
    counts = torch.tensor([0.5, 2.0, 0.0])

    def heads(rows: slice) -> Supervised:
        return Supervised(outputs[0, rows], ((0.4, outputs[1, rows]),))

    apart = [counts[i] * one.loss(heads(slice(i, i + 1)), partial_batch(truths[i : i + 1], shown[i])) for i in range(3)]
    alone = torch.stack(apart).mean()
    together = one.loss(heads(slice(None)), partial_batch(truths, *shown), weights=counts)
    assert together.item() == pytest.approx(alone.item(), rel=1e-5)
    slopes = [torch.autograd.grad(loss, outputs)[0] for loss in (alone, together)]
    torch.testing.assert_close(slopes[1], slopes[0])
    assert slopes[1][:, 0].any() and not slopes[1][:, 2].any()


def test_only_what_is_shown_is_scored() -> None:
    found = task(NESTED).score(torch.ones(2, 1, 4), MASK, full=True, labels=("cup",))
    assert {mark.label for mark in found} == {"cup"}


# ------------------------------------------------------------------------------------------------ decisions


def test_exclusive_decisions_are_the_largest() -> None:
    assert task().decide(logits(MASK)).tolist() == MASK.tolist()
    assert task().decide(logits(MASK)).dtype == torch.uint8


def test_inner_structures_overwrite_outer_ones() -> None:
    output = torch.tensor([[[-1.0, 1.0, 1.0, 1.0]], [[-1.0, -1.0, 1.0, 1.0]]])  # cup inside disc
    assert task(NESTED).decide(output).tolist() == [[0, 1, 2, 2]]
    assert task(NESTED).decided_channels(output).tolist() == (output > 0).tolist()


def test_a_decision_can_be_split_into_the_channels_it_came_from() -> None:
    found = task(NESTED)
    output = torch.tensor([[[-1.0, 1.0, 1.0, 1.0]], [[-1.0, -1.0, -1.0, 1.0]]])
    mask = found.decide(output)
    assert found.channels_of(mask[None])[0].equal(output > 0)


# ------------------------------------------------------------------------------------------------ scores


def picture(rows: slice, columns: slice, value: int = 1) -> Tensor:
    mask = torch.zeros(4, 4, dtype=torch.long)
    mask[rows, columns] = value
    return mask


def test_all_scores_by_hand() -> None:
    """Truth 2 × 2, prediction 2 × 3 around it in a 4 × 4 picture: 4 in both, 6 in either."""
    truth, predicted = picture(slice(0, 2), slice(0, 2)), picture(slice(0, 2), slice(0, 3))
    found = marks(task(), logits(predicted), truth)
    assert found["disc", "dice"] == pytest.approx(2 * 4 / (4 + 6))
    assert found["disc", "jaccard"] == pytest.approx(4 / 6)
    assert found["disc", "sensitivity"] == 1.0
    assert found["disc", "specificity"] == pytest.approx((12 - 2) / 12)
    assert found["disc", "volume_error"] == found["disc", "volume_error_abs"] == pytest.approx((6 - 4) / 4)
    assert found["disc", "hd95"] == pytest.approx(1.0)  # one column too far


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_a_distance_is_in_pixels(shift: int) -> None:
    truth, predicted = picture(slice(0, 1), slice(0, 1)), picture(slice(0, 1), slice(shift, shift + 1))
    found = marks(task(), logits(predicted), truth)
    assert found["disc", "hd95"] == pytest.approx(shift)
    assert found["disc", "dice"] == 0.0


def test_an_empty_truth_is_counted_not_scored() -> None:
    nothing, something = torch.zeros(4, 4, dtype=torch.long), picture(slice(0, 2), slice(0, 2))
    found = marks(task(), logits(something), nothing)
    assert {key for key in found if key[0] == "disc"} == {("disc", "empty"), ("disc", "false_positive_volume")}
    assert (found["disc", "empty"], found["disc", "false_positive_volume"]) == (1.0, 4.0)


def test_an_empty_prediction_is_counted_as_missed() -> None:
    nothing, something = torch.zeros(4, 4, dtype=torch.long), picture(slice(0, 2), slice(0, 2))
    found = marks(task(), logits(nothing), something)
    assert (found["disc", "dice"], found["disc", "sensitivity"], found["disc", "missed"]) == (0.0, 0.0, 1.0)
    assert found["disc", "volume_error"] == -1.0
    assert found["disc", "volume_error_abs"] == 1.0
    assert ("disc", "hd95") not in found


def test_the_names_of_all_scores_are_known_before_any_case() -> None:
    masks = [np.zeros((4, 4), bool), np.pad(np.ones((2, 2), bool), 1)]
    found = {name for a in masks for b in masks for name in overlap(a, b, True, (1.0, 1.0))}
    assert found == {*SCORES, "empty"}


def test_quick_scores_are_dice_only() -> None:
    truth = picture(slice(0, 2), slice(0, 2))
    assert marks(task(), logits(truth), truth, full=False) == {("disc", "dice"): 1.0, ("cup", "empty"): 1.0}


def test_a_mask_that_fills_the_picture_has_no_specificity() -> None:
    full = torch.ones(4, 4, dtype=torch.long)
    assert ("disc", "specificity") not in marks(task(), logits(full), full)


def test_nested_scores_use_whole_regions() -> None:
    """The disc's Dice counts the cup's voxels: 3 of 3 although one of them is a cup."""
    output = torch.tensor([[[-1.0, 1.0, 1.0, 1.0]], [[-1.0, -1.0, -1.0, -1.0]]])
    found = marks(task(NESTED), output, MASK)
    assert (found["disc", "dice"], found["cup", "dice"]) == (1.0, 0.0)


@pytest.mark.xdist_group("monai")
@pytest.mark.parametrize("seed", range(4))
def test_distances_are_monais(seed: int) -> None:
    """Blobs in a volume of thick slices: the Hausdorff distance and its 95th percentile, in voxels and in mm."""
    from monai.metrics import compute_hausdorff_distance

    rng = np.random.default_rng(seed)
    z, y, x = np.mgrid[:9, :14, :13]
    masks = []
    for _ in range(2):
        a, b, c = rng.uniform(3, 6, 3)
        masks.append((z - a) ** 2 / 6 + (y - b) ** 2 / 12 + (x - c) ** 2 / 9 < 1.2)
    both = [torch.from_numpy(mask)[None, None] for mask in masks]
    scores = overlap(*masks, full=True, spacing=(3.0, 0.8, 1.1))
    for name, percentile, spacing in (
        ("hd", None, None),
        ("hd95", 95, None),
        ("hd_mm", None, (3.0, 0.8, 1.1)),
        ("hd95_mm", 95, (3.0, 0.8, 1.1)),
    ):
        with warnings.catch_warnings():  # MONAI calls its own deprecated argument
            warnings.simplefilter("ignore", FutureWarning)
            theirs = compute_hausdorff_distance(*both, include_background=True, percentile=percentile, spacing=spacing)
        assert scores[name] == pytest.approx(float(theirs), rel=1e-5), name


def test_a_distance_in_mm_follows_the_spacing() -> None:
    truth, predicted = picture(slice(0, 1), slice(0, 1)), picture(slice(2, 3), slice(0, 1))
    found = {
        m.metric: m.value for m in task().score(logits(predicted), truth, True, spacing=(5.0, 1.0)) if m.label == "disc"
    }
    assert (found["hd"], found["hd95"], found["hd_mm"], found["hd95_mm"]) == (2.0, 2.0, 10.0, 10.0)


def test_a_mask_is_cleaned_up_by_hand() -> None:
    """A hole is filled unless another label is in it; pieces below a fifth of the largest go."""
    drawn = np.array([
        [1, 1, 1, 0, 2, 2, 2, 0],
        [1, 0, 1, 0, 2, 1, 2, 0],
        [1, 1, 1, 0, 2, 2, 2, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 2],
    ], dtype=np.uint8)  # fmt: skip
    wanted = drawn.copy()
    wanted[1, 1] = 1
    wanted[1, 5] = wanted[4, 7] = 0  # a single 1 beside nine, a single 2 beside eight; the pair of 1 stays
    assert cleaned(drawn).tolist() == wanted.tolist()
    assert not cleaned(np.zeros((3, 3), np.uint8)).any()


def test_cleaned_masks_are_scored_beside_the_others() -> None:
    truth = picture(slice(0, 3), slice(0, 3))
    predicted = truth.clone()
    predicted[1, 1] = 0
    found = marks(task(clean_up=True), logits(predicted), truth)
    assert found["disc", "dice"] == pytest.approx(16 / 17)
    assert found["disc", "clean_dice"] == found["disc", "clean_jaccard"] == 1.0
    assert ("cup", "clean_empty") not in found and found["cup", "empty"] == 1.0
    assert not any(name.startswith("clean_") for _, name in marks(task(clean_up=True), logits(predicted), truth, False))


# ------------------------------------------------------------------------------------------------ inference


def test_a_window_that_covers_the_volume_is_the_whole_volume() -> None:
    volume = torch.rand(1, 1, 8, 16, 16, generator=torch.Generator().manual_seed(0))
    whole, windows = (task(dimensions=3, patch=patch) for patch in ((), (8, 16, 16)))
    start = whole.initial()
    torch.testing.assert_close(windows.infer(start, volume), whole.infer(start, volume), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("size", "patch"), [((10, 17, 19), (8, 8, 8)), ((5, 6, 7), (8, 8, 8)), ((7, 9, 11), ())])
def test_odd_volumes_in_windows(size: tuple[int, ...], patch: tuple[int, ...]) -> None:
    found = task(dimensions=3, patch=patch)
    assert found.infer(found.initial(), torch.rand(1, 1, *size)).shape == (1, 3, *size)


def test_odd_pictures() -> None:
    found = task()
    assert found.infer(found.initial(), torch.rand(2, 1, 13, 17)).shape == (2, 3, 13, 17)


def test_inference_notices_other_weights() -> None:
    """The network at hand is loaded again whenever the weights change, and not left in training mode."""
    found = task()
    image = torch.rand(1, 1, 8, 8)
    first, second = found.initial(draw=0), found.initial(draw=1)
    once = found.infer(first, image)
    assert not found.infer(second, image).equal(once)
    assert found.infer(first, image).equal(once)


def test_starts_are_seeded_and_draws_differ() -> None:
    assert task(seed=1).initial().digest == task(seed=1).initial().digest
    assert len({task(seed=s).initial(draw=d).digest for s in (0, 1) for d in (0, 1)}) == 4
    shape = task().shape()
    assert {k: t.shape for k, t in shape.items()} == {k: t.shape for k, t in task().initial().items()}
    assert all(tensor.device.type == "meta" for tensor in shape.values())


def test_the_parameters_of_a_network_with_statistics() -> None:
    normed = task(model=UNet((4, 8), 1, norm="batch"))
    statistics = set(normed.initial()) - normed.parameters()
    assert statistics
    assert all(name.endswith(("running_mean", "running_var", "num_batches_tracked")) for name in statistics)
