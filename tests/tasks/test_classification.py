"""Classification: accuracy and the area under the curve, by hand."""

from __future__ import annotations

import pytest
import torch

from consilium.batch import Batch
from consilium.networks.cnn import CNN
from consilium.networks.vgg import SmallVGG
from consilium.tasks.classification import Classification


def task(*labels: str) -> Classification:
    return Classification(labels or ("healthy", "ill"), 2, 1, CNN((4, 8), 16), SmallVGG((4,)))


def test_accuracy_of_one_case() -> None:
    for truth, value in ((0, 0.0), (1, 1.0)):
        (mark,) = task().score(torch.tensor([0.1, 0.9]), torch.tensor(truth), full=False)
        assert (mark.label, mark.metric, mark.value) == ("class", "accuracy", value)


def outputs(*chances: float) -> list[torch.Tensor]:
    """Logits whose softmax gives these chances of the second class."""
    return [torch.tensor([1 - p, p]).log() for p in chances]


def truths(*classes: int) -> list[torch.Tensor]:
    return [torch.tensor(c) for c in classes]


def test_the_area_under_the_curve_by_hand() -> None:
    """Ill .9 and .4, healthy .8 and .1: of four pairs three are in order."""
    (mark,) = task().score_all(outputs(0.9, 0.4, 0.8, 0.1), truths(1, 1, 0, 0), full=True)
    assert (mark.metric, mark.value) == ("auc", pytest.approx(0.75))


def test_the_area_is_the_mean_over_the_classes_seen() -> None:
    """Of three classes the third is not at this site: one against the rest for the first two only."""
    given = [torch.tensor(x).log() for x in ([0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.2, 0.7, 0.1])]
    (mark,) = task("a", "b", "c").score_all(given, truths(0, 1, 1), full=True)
    assert mark.value == pytest.approx(1.0)  # a: .6 before .5 and .2; b: .4 and .7 before .3


@pytest.mark.parametrize(("classes", "full"), [((1, 1, 1), True), ((0, 1, 1), False)])
def test_no_area_with_one_class_or_while_training(classes: tuple[int, ...], full: bool) -> None:
    assert task().score_all(outputs(0.9, 0.4, 0.2), truths(*classes), full) == []


def test_no_area_without_cases() -> None:
    assert task().score_all([], [], full=True) == []


def test_the_loss_is_cross_entropy() -> None:
    """Chances .8 and .5 of the right class: −(ln .8 + ln .5)/2."""
    given = torch.tensor([[0.2, 0.8], [0.5, 0.5]]).log()
    loss = task().loss(given, Batch(torch.zeros(1), torch.tensor([1, 0]), ("a", "b")))
    assert loss.item() == pytest.approx(-(torch.tensor(0.8).log() + torch.tensor(0.5).log()).item() / 2)
    weighed = task().loss(
        given, Batch(torch.zeros(1), torch.tensor([1, 0]), ("a", "b")), weights=torch.tensor([3, 0.5])
    )
    assert weighed.item() == pytest.approx(-(3 * torch.tensor(0.8).log() + 0.5 * torch.tensor(0.5).log()).item() / 2)


def test_decisions_and_shapes() -> None:
    found = task("a", "b", "c")
    assert found.decide(torch.tensor([0.1, 2.0, 1.0])).item() == 1
    assert found.infer(found.initial(), torch.rand(2, 1, 16, 16)).shape == (2, 3)
