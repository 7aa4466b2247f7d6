"""Algorithm 2: max ŷ_s > γ sends an image to that site's model, else to the global one; γ is chosen on validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.errors import StudyError
from consilium.methods.routing import GRID, NetworkRouter, SuperModel, calibration, chosen_confidence
from consilium.site import Mark, SiteCard
from consilium.tasks.segmentation import Segmentation
from consilium.weights import Weights
from consilium.worker import open_worker
from tests.learning.small import Line, batch, line, site
from tests.toy import SIZES, toy_study


class Routed(Line):
    """Images are one number x. Chances are softmax(x · selector); a model's error is its score, the lower x."""

    def infer(self, weights: Weights, images: Any, kind: str = "model", labels: Any = None) -> torch.Tensor:
        return images @ weights["weight"].T

    def score(self, output: torch.Tensor, truth: torch.Tensor, full: bool, *_: Any, **__: Any) -> list[Mark]:
        return [Mark("y", "error", float(output[0]))]


def super_model(gamma: float, home: str = "ada") -> SuperModel:
    """Global gives 10 x, ada x, bea 2 x; ada's chance is 1/(1 + e⁻ˣ): even at x = 0, .88 at x = 2."""
    selector = Weights({"weight": torch.tensor([[0.5], [-0.5]])})
    router = NetworkRouter(Routed(), selector, ["ada", "bea"])
    return SuperModel(Routed(), line(10.0), {"ada": line(1.0), "bea": line(2.0)}, router, gamma, home)


IMAGES = torch.tensor([[2.0], [-2.0], [0.1]])


@pytest.mark.parametrize(
    ("gamma", "keys", "outputs"),
    [
        (0.0, ["personal/ada", "personal/bea", "personal/ada"], [2.0, -4.0, 0.1]),
        (0.8, ["personal/ada", "personal/bea", "global"], [2.0, -4.0, 1.0]),
        (0.9, ["global", "global", "global"], [20.0, -20.0, 1.0]),
        (1.0, ["global", "global", "global"], [20.0, -20.0, 1.0]),
    ],
)
def test_each_image_goes_to_the_model_that_knows_it(gamma: float, keys: list[str], outputs: list[float]) -> None:
    answer = super_model(gamma).answer(IMAGES)
    assert [choice.key for choice in answer.choices] == keys
    assert answer.output.squeeze(1).tolist() == pytest.approx(outputs)


def test_the_reason_is_said_with_its_numbers() -> None:
    sure, _, unsure = super_model(0.8).answer(IMAGES).choices
    assert sure.why == "most like ada (0.881 > 0.8)"
    assert unsure.why == "not sure of any site (at most ada with 0.525 <= 0.8)"
    assert sure.chances == pytest.approx({"ada": 0.8808, "bea": 0.1192}, abs=1e-4)
    assert sure.confidence == pytest.approx(0.8808, abs=1e-4)


def test_the_threshold_is_strict() -> None:
    """A chance of exactly γ goes to the global model: .5 at x = 0 with γ = .5."""
    (choice,) = super_model(0.5).answer(torch.tensor([[0.0]])).choices
    assert choice.key == "global"


def test_extremes_hold_for_any_network(federation: Path) -> None:
    """γ = 0 never uses the global model and γ = 1 always does, whatever the selector says."""
    task = toy_study(federation, "fedsm").task
    personal = {name: task.initial(draw=i + 1) for i, name in enumerate(SIZES)}
    selector = task.initial("selector", labels=list(SIZES))
    images = torch.rand(6, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    for sharpness in (1.0, 1e4):  # even odds, and chances that round to 1
        for gamma, expected in ((0.0, {"personal"}), (1.0, {"global"})):
            router = NetworkRouter(task, selector * sharpness, list(SIZES))
            model = SuperModel(task, task.initial(), personal, router, gamma, "")
            assert {choice.model for choice in model.answer(images).choices} == expected


def test_what_else_is_scored() -> None:
    assert [(p.model, p.of) for p in super_model(0.0, "bea").others()] == [("global", ""), ("personal", "bea")]
    assert [(p.model, p.of) for p in super_model(0.0, "").others()] == [("global", "")]


def test_one_hospitals_own_model_can_be_asked_for() -> None:
    assert super_model(0.0).of_site("bea").of == "bea"
    with pytest.raises(StudyError, match="no site 'dan' in this run; its sites are ada, bea"):
        super_model(0.0).of_site("dan")


# ------------------------------------------------------------------------------------------------ γ


def test_tallies_by_hand() -> None:
    """x = 2 (chance .88): ada scores 2, global 20. x = .1 (.525): ada .1, global 1. Sums by γ of the grid."""
    here = site(batch([2.0, 0.1], [0.0, 0.0]), roster=["ada", "bea"])
    sums, cases = calibration(super_model(0.0), here.__class__(**{**vars(here), "task": Routed()}))
    assert cases == 2
    by_hand = [2.1 if gamma < 0.525 else 3.0 if gamma < 0.88 else 21.0 for gamma in GRID]
    assert list(sums) == pytest.approx(by_hand)


def test_the_ends_of_the_tally_are_all_personal_and_all_global(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "fedsm")
    roster = {name: SiteCard(name, i, n, ("blob",)) for i, (name, (n, _, _)) in enumerate(SIZES.items())}
    here = open_worker(study, study.federation(), "bea", roster, tmp_path).site
    task = study.task
    assert isinstance(task, Segmentation)
    personal = {name: task.initial(draw=i + 1) for i, name in enumerate(SIZES)}
    router = NetworkRouter(task, task.initial("selector", labels=list(SIZES)), list(SIZES))
    model = SuperModel(task, task.initial(), personal, router, 0.0, "bea")
    sums, cases = calibration(model, here)
    (valid,) = here.data.whole("valid", 10)
    for gamma, at in ((0.0, 0), (1.0, -1)):
        model.confidence = gamma
        output = model.answer(valid.images).output
        dice = [task.score(output[i], valid.truth[i], False)[0].value for i in range(len(valid.cases))]
        assert sums[at] == pytest.approx(sum(dice))
    assert cases == 3


def tally(**better: float) -> tuple[tuple[float, ...], int]:
    """Ten for every γ, more for those named `g0_9=12`."""
    return tuple(better.get(f"g{gamma:g}".replace(".", "_"), 10.0) for gamma in GRID), 20


@pytest.mark.parametrize(
    ("tallies", "expected"),
    [
        ([tally(g0_9=12.0)], 0.9),
        ([tally(g0_9=12.0), tally(g0_5=13.0)], 0.5),  # pooled: 10 + 13 beats 12 + 10
        ([tally(g0_5=11.0, g0_9=12.0), tally(g0_5=11.5)], 0.5),  # 22.5 beats 22
        ([tally(g0_5=12.0, g0_6=12.0, g0_7=12.0)], 0.6),  # the middle of a tie
        ([tally(g0_5=12.0, g0_6=12.0)], 0.5),  # of two, the lower
        ([tally()], 0.9),  # all alike: the middle of the grid
        ([tally(g0=12.0)], 0.0),
        ([tally(g1=12.0), ((0.0,) * len(GRID), 0)], 1.0),  # a site without cases says nothing
    ],
)
def test_the_best_gamma_on_pooled_validation(tallies: list[Any], expected: float) -> None:
    assert chosen_confidence(tallies) == expected


def test_no_gamma_below_the_global_model_in_the_mean_over_sites() -> None:
    """γ = 0 is best pooled: 40 + 0 against 30 + 1. Over sites it is worse than the global model: .5 against .875."""
    large, small = ((40.0,) * 12 + (30.0,), 40), ((0.0,) * 12 + (1.0,), 1)
    assert chosen_confidence([large, small]) == 1.0
    assert chosen_confidence([large]) < 1.0  # type: ignore[operator]


def test_nobody_with_validation_cases() -> None:
    assert chosen_confidence([((0.0,) * len(GRID), 0)]) is None


def test_the_grid_reaches_from_never_to_always() -> None:
    assert (GRID[0], GRID[-1]) == (0.0, 1.0)
    assert list(GRID) == sorted(GRID)
