"""Algorithm 2: max ŷ_s > γ sends an image to that site's model, else to the global one; γ is chosen on validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.errors import StudyError
from consilium.methods.fedsm import FedSM
from consilium.methods.routers import NetworkRouter
from consilium.methods.routing import GRID, NOTHING, Calibration, SuperModel, calibration, chosen_confidence
from consilium.site import Round, SiteCard
from consilium.site_opening import open_worker
from consilium.task import CaseScore
from consilium.tasks.segmentation import Segmentation
from consilium.weights import Weights
from tests.learning.small import Line, batch, line, site
from tests.toy import SIZES, toy_study


class Routed(Line):
    """Images are one number x. Chances are softmax(x · selector); a model's error is its score, the lower x."""

    def infer(self, weights: Weights, images: Any, kind: str = "model", labels: Any = None) -> torch.Tensor:
        return images @ weights["weight"].T

    def score(self, output: torch.Tensor, truth: torch.Tensor, full: bool, *_: Any, **__: Any) -> list[CaseScore]:
        return [CaseScore("y", "error", float(output.mean()))]


def super_model(gamma: float, home: str = "ada", route: str = "volume") -> SuperModel:
    """Global gives 10 x, ada x, bea 2 x; ada's chance is 1/(1 + e⁻ˣ): even at x = 0, .88 at x = 2."""
    selector = Weights({"weight": torch.tensor([[0.5], [-0.5]])})
    router = NetworkRouter(Routed(), selector, ["ada", "bea"])
    return SuperModel(Routed(), line(10.0), {"ada": line(1.0), "bea": line(2.0)}, router, gamma, home, route)


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
    (never,) = super_model(1.0).answer(IMAGES[:1]).choices
    assert never.why == "every image goes to the global model, because γ is 1 (most like ada with 0.881)"
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
    found = calibration(super_model(0.0), here, "slice")
    assert (found.cases, found.wholes) == (2, 2)
    by_hand = [2.1 if gamma < 0.525 else 3.0 if gamma < 0.88 else 21.0 for gamma in GRID]
    assert found.scores == pytest.approx(by_hand)
    gains = [(-18.0, -0.9) if gamma < 0.525 else (-18.0, 0.0) if gamma < 0.88 else (0.0, 0.0) for gamma in GRID]
    assert found.gains == pytest.approx([sum(pair) for pair in gains])
    assert found.squares == pytest.approx([sum(gain**2 for gain in pair) for pair in gains])


@pytest.mark.parametrize(
    ("route", "unit", "steps", "count"),
    [
        ("slice", "slice", {0.525: 2.1, 0.88: 3.0, 2.0: 21.0}, 2),
        ("slice", "volume", {0.525: 1.05, 0.88: 1.5, 2.0: 10.5}, 1),  # in between, one slice from each model
        ("volume", "slice", {0.703: 2.1, 2.0: 21.0}, 2),  # both slices have the mean chance, (.88 + .525) / 2
        ("volume", "volume", {0.703: 1.05, 2.0: 10.5}, 1),
    ],
)
def test_gamma_is_judged_by_what_decides_however_slices_are_routed(
    route: str, unit: str, steps: dict[float, float], count: int
) -> None:
    """The slices of one volume, x = 2 and .1; a volume's score is the mean of its slices' here."""
    slices = replace(batch([2.0, 0.1], [0.0, 0.0]), volume="scan")
    found = calibration(super_model(0.0, route=route), site(slices, roster=["ada", "bea"]), unit)
    by_hand = [next(total for below, total in steps.items() if gamma < below) for gamma in GRID]
    assert (found.scores, found.cases) == (pytest.approx(by_hand), count)
    gains = [(total - by_hand[-1]) / count for total in by_hand]  # the mean of its slices: a volume counts once
    assert (found.wholes, found.gains) == (1, pytest.approx(gains))


class ByVolumes(Routed):
    """The same, and volumes decide."""

    decides = "volume"


@pytest.mark.parametrize(
    ("task", "route", "tuned_by", "cases"),
    [
        (Routed(), "volume", "sites", 2),
        (ByVolumes(), "slice", "sites", 1),
        (Routed(), "volume", "pooled", 1),  # 0.1 judged what it routed
        (ByVolumes(), "slice", "pooled", 2),
    ],
)
def test_fedsm_counts_slices_or_volumes_as_the_task_decides(task: Any, route: str, tuned_by: str, cases: int) -> None:
    slices = replace(batch([2.0, 0.1], [0.0, 0.0]), volume="scan")
    here = replace(site(slices, roster=["ada", "bea"]), task=task)
    selector = Weights({"weight": torch.tensor([[0.5], [-0.5]])})
    method = FedSM(route=route, tuned_by=tuned_by, selector_training="synchronised")
    trial = method.Release(line(10.0), {"ada": line(1.0), "bea": line(2.0)}, selector, 0.0, "ada")
    got = method.Downlink(None, None, None, None, None, trial)
    uplink, _ = method.train(here, method.remember(here), got, Round(3, "calibrate", 0, 1))
    assert uplink.calibration is not None and uplink.calibration.cases == cases


def test_the_ends_of_the_tally_are_all_personal_and_all_global(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "fedsm")
    roster = {name: SiteCard(name, i, n, ("blob",)) for i, (name, (n, _, _)) in enumerate(SIZES.items())}
    here = open_worker(study, study.federation(), "bea", roster, tmp_path).site
    task = study.task
    assert isinstance(task, Segmentation)
    personal = {name: task.initial(draw=i + 1) for i, name in enumerate(SIZES)}
    router = NetworkRouter(task, task.initial("selector", labels=list(SIZES)), list(SIZES))
    model = SuperModel(task, task.initial(), personal, router, 0.0, "bea")
    found = calibration(model, here, "slice")
    (valid,) = here.data.whole("valid", 10)
    for gamma, at in ((0.0, 0), (1.0, -1)):
        model.confidence = gamma
        output = model.answer(valid.images).output
        dice = [task.score(output[i], valid.truth[i], False)[0].value for i in range(len(valid.cases))]
        assert found.scores[at] == pytest.approx(sum(dice))
    assert found.cases == 3


def of(scores: tuple[float, ...], cases: int, spread: float = 0.0) -> Calibration:
    """Sums of so many cases, whose gains have this standard deviation (of the sample) for every γ."""
    gains = tuple(score - scores[-1] for score in scores)
    squares = tuple(gain**2 / max(1, cases) + spread**2 * (cases - 1) for gain in gains)
    return Calibration(cases, scores, cases, gains, squares)


def tally(**better: float) -> Calibration:
    """Ten for every γ, more for those named `g0_9=12`."""
    return of(tuple(better.get(f"g{gamma:g}".replace(".", "_"), 10.0) for gamma in GRID), 20)


@pytest.mark.parametrize(
    ("tallies", "expected"),
    [
        ([tally(g0_9=12.0)], 0.9),
        ([tally(g0_9=12.0), tally(g0_5=13.0)], 0.5),  # 1.0 + 1.3 beats 1.2 + 1.0
        ([tally(g0_5=11.0, g0_9=12.0), tally(g0_5=11.5)], 0.5),  # 1.1 + 1.15 beats 1.2 + 1.0
        ([tally(g0_5=12.0, g0_6=12.0, g0_7=12.0)], 0.6),  # the middle of a tie
        ([tally(g0_5=12.0, g0_6=12.0)], 0.5),  # of two, the lower
        ([tally()], 0.9),  # all alike: the middle of the grid
        ([tally(g0=12.0)], 0.0),
        ([tally(g1=12.0), NOTHING], 1.0),  # a site without cases says nothing
    ],
)
def test_the_best_gamma_on_validation_over_sites(tallies: list[Any], expected: float) -> None:
    assert chosen_confidence(tallies, "sites") == expected


def test_sites_count_alike_whatever_their_number_of_cases() -> None:
    """γ = 0 is best pooled: 40 + 0 against 30 + 1. Over sites it is worse than the global model: .5 against .875."""
    large, small = of((40.0,) * 12 + (30.0,), 40), of((0.0,) * 12 + (1.0,), 1)
    for rule in ("sites", "pooled"):  # neither takes a γ that is worse over sites than the global model
        assert chosen_confidence([large, small], rule) == 1.0
        assert chosen_confidence([large], rule) < 1.0  # type: ignore[operator]


def test_the_rule_of_0_1_takes_the_best_pooled_mean() -> None:
    """γ = .5: 40 of 40 and .1 of 1, pooled 40.1, over sites .55. γ = .9: 30 and 1, pooled 31, over sites .875."""
    large, small = (
        of((20.0, 20.0, 40.0, *(20.0,) * 3, 30.0, *(20.0,) * 6), 40),
        of((0.5, 0.5, 0.1, *(0.5,) * 3, 1.0, *(0.5,) * 6), 1),
    )
    assert chosen_confidence([large, small], "pooled") == 0.5
    assert chosen_confidence([large, small], "sites") == 0.9


def test_nobody_with_validation_cases() -> None:
    assert chosen_confidence([NOTHING], "sites") is None


@pytest.mark.parametrize(
    ("spread", "errors", "expected"),
    [
        # 9 cases at one site gain .1 each at γ = .5, 16 at the other nothing. The mean over sites is .05, its error
        # with a spread of s is s · √(1/9 + 1/16) / 2 = s · 5/24: .05 at s = .24
        (0.23, 1.0, 0.5),
        (0.25, 1.0, 1.0),
        (0.25, 0.9, 0.5),
        (0.25, 0.0, 0.5),
        (10.0, 0.0, 0.5),
    ],
)
def test_a_gamma_whose_gain_may_be_chance_is_not_chosen(spread: float, errors: float, expected: float) -> None:
    scores = tuple(5.4 if gamma == 0.5 else 4.5 if gamma == 1.0 else 4.0 for gamma in GRID)
    lower = tuple(8.0 if gamma in (0.5, 1.0) else 7.0 for gamma in GRID)
    assert chosen_confidence([of(scores, 9, spread), of(lower, 16, spread)], "sites", errors) == expected


@pytest.mark.parametrize(("gains", "expected"), [((0.3, 0.1), 0.0), ((0.3, -0.1), 1.0)])
def test_with_one_case_at_every_site_the_spread_is_that_of_the_sites(gains: Any, expected: float) -> None:
    """Gains .3 and .1: mean .2, error √(.02 · 2) / 2 = .1. Gains .3 and −.1: mean .1, error .2."""
    found = [of((0.5 + gain, *(0.0,) * 11, 0.5), 1) for gain in gains]
    assert chosen_confidence(found, "sites", 1.0) == expected


def test_gamma_needs_no_gain_where_it_changes_nothing() -> None:
    """A selector that is never sure enough for γ ≥ .9: these γ are the global model for all, and as certain."""
    scores = tuple(4.0 if gamma < 0.9 else 5.0 for gamma in GRID)
    assert chosen_confidence([of(scores, 10)], "sites", 1.0) == 0.99


def test_the_grid_reaches_from_never_to_always() -> None:
    assert (GRID[0], GRID[-1]) == (0.0, 1.0)
    assert list(GRID) == sorted(GRID)
