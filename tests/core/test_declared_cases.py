"""How many cases a site speaks of is held against what it declared at roll call, and sums against that number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.errors import StudyError
from consilium.intake import accepted
from consilium.learning.discriminant import NO_CASES, FeatureSums, RoutingSums, discriminant, sums_of, tempered
from consilium.method import CasesOf, message
from consilium.methods import METHODS
from consilium.methods.routing import GRID, NOTHING
from consilium.tree import flatten
from consilium.wires.site_wire import Returned
from tests.core.lying import events, run_with
from tests.toy import toy_study

FedSM: Any = METHODS["fedsm"]
VALID: Any = CasesOf("valid")
BLANK = FedSM()._uplink(calibration=replace(NOTHING, cases=VALID, wholes=VALID))
HAS = {"train": 8, "valid": 3, "test": 3}


def why(**sent: Any) -> str:
    """Why a reply of FedSM's calibration is refused."""
    own = {key: value for key, value in sent.items() if key in vars(NOTHING)}
    found = replace(NOTHING, **{"scores": (2.5,) * len(GRID), "cases": 3, "wholes": 3, **own})
    reply = FedSM()._uplink(calibration=found, **{key: value for key, value in sent.items() if key not in own})
    return accepted(flatten(reply), FedSM.Uplink, BLANK, HAS)[1]


def test_a_calibration_within_the_roll_call_is_taken() -> None:
    assert why() == ""
    assert why(scores=(3.0,) * len(GRID)) == ""
    assert why(cases=0, wholes=0, scores=(0.0,) * len(GRID)) == ""
    assert why(wholes=1, gains=(-1.0,) * len(GRID), squares=(1.0,) * len(GRID)) == ""  # three slices of one volume


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"cases": 4}, "'calibration/cases' is 4, where the site has 3 valid cases"),
        ({"cases": 2**40}, "'calibration/cases' is 1099511627776, where the site has 3 valid cases"),
        ({"cases": -1}, "'calibration/cases' is -1, not from 0 to 1.09951e+12"),
        ({"scores": (3.1,) * len(GRID)}, "'calibration': scores of 3 cases cannot be so large"),
        ({"scores": (-1.0,) * len(GRID)}, "'calibration/scores/0' is -1.0, not from 0 to 1.09951e+12"),
        ({"wholes": 0}, "'calibration': 3 cases cannot be of 0 images or volumes"),
        ({"cases": 2}, "'calibration': 2 cases cannot be of 3 images or volumes"),
        ({"gains": (-3.1,) * len(GRID)}, "'calibration': gains of 3 cases cannot be so large"),
        ({"squares": (3.1,) * len(GRID)}, "'calibration': gains of 3 cases cannot be so large"),
        ({"loss": -1.0}, "'loss' is -1.0, not from -0.001 to 1e+09"),
        ({"loss": 1e12}, "'loss' is 1000000000000.0, not from -0.001 to 1e+09"),
        ({"steps": -3}, "'steps' is -3, not from 0 to 1.09951e+12"),
    ],
)
def test_what_cannot_be_is_refused(sent: dict[str, Any], said: str) -> None:
    assert why(**sent) == said


@message
class Sums:
    features: FeatureSums
    routing: RoutingSums


def sums_refused(features: FeatureSums, routing: RoutingSums) -> str:
    blank = Sums(replace(sums_of(torch.zeros(1, 2)), n=CasesOf("train")), replace(NO_CASES, cases=CasesOf("valid")))
    return accepted(flatten(Sums(features, routing)), Sums, blank, HAS)[1]


def test_sums_of_a_discriminant_are_held_against_their_number() -> None:
    sound = sums_of(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    many = len(NO_CASES.log_distance)
    assert sums_refused(sound, NO_CASES) == ""
    assert sums_refused(replace(sound, n=9), NO_CASES) == "'features/n' is 9, where the site has 8 train cases"
    assert sums_refused(replace(sound, n=0), NO_CASES) == "'features': features of no image have no mean"
    turned = replace(sound, scatter=-sound.scatter)
    assert sums_refused(turned, NO_CASES) == "'features': a scatter is negative"
    far = replace(NO_CASES, cases=2, log_distance=(201.0,) * many)
    assert sums_refused(sound, far) == "'routing': the distances of 2 cases cannot be so large"
    struck = replace(NO_CASES, cases=2, surprise=(101.0,) * len(NO_CASES.surprise))
    assert sums_refused(sound, struck) == "'routing': the surprise of 2 cases cannot be so large"


def test_the_farthest_distances_that_are_let_in_break_nothing() -> None:
    """The limit is an exponential: it may not overflow for whatever passes the door."""
    many = len(NO_CASES.log_distance)
    far = replace(NO_CASES, cases=2, log_distance=(200.0,) * many, log_distance_squared=(20_000.0,) * many)
    mixed = replace(NO_CASES, cases=3, log_distance=(-300.0,) * many, log_distance_squared=(30_000.0,) * many)
    found = discriminant({"a": sums_of(torch.randn(4, 2)), "b": sums_of(torch.randn(4, 2))})
    limits = tempered(found, {"a": far, "b": mixed}, 0.999999).limits
    assert all(limit < float("inf") for limit in limits.values())


def test_a_site_that_counts_more_than_it_declared_is_left_out_of_the_calibration(
    federation: Path, tmp_path: Path
) -> None:
    networks = {"method__selector_training": "synchronised"}  # the closed form counts cases before that phase too
    study = toy_study(federation, "fedsm", study__rounds=1, study__score_every=1, **networks)

    def lie(site: str, count: int, answer: Returned) -> Returned:
        if site != "bea" or answer.packet is None or '\\"cases\\":3' not in answer.packet.header:
            return answer
        header = answer.packet.header.replace('\\"cases\\":3', '\\"cases\\":3000000')
        return replace(answer, packet=answer.packet._replace(header=header))

    folder = run_with(study, tmp_path, lie)
    [refused] = events(folder, "refused")
    assert (refused["site"], refused["phase"]) == ("bea", "calibrate")
    assert refused["why"] == "'calibration/cases' is 3000000, where the site has 3 valid cases"
    assert folder.finished


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"scored": {"valid": 10, "test": 10}, "cases": 14}, "it says that it scores 20 of 14 cases"),
        ({"scored": {"valid": 2000000}, "cases": 2**30}, "2000000 validation cases, and [study] max_cases is 1000000"),
    ],
)
def test_a_card_with_more_cases_to_score_than_can_be_is_not_believed(
    federation: Path, tmp_path: Path, facts: dict[str, Any], said: str
) -> None:
    def lie(site: str, count: int, answer: Returned) -> Returned:
        if site != "bea" or count:
            return answer
        assert answer.head.card is not None
        return replace(answer, head=replace(answer.head, card=replace(answer.head.card, **facts)))

    with pytest.raises(StudyError) as error:
        run_with(toy_study(federation), tmp_path, lie)
    assert said in str(error.value)
