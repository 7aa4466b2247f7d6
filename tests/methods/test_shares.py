"""`[method] shares`: FedAvg and its kin average by numbers of cases, or give every site the same share."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.contract import run_in_process, state
from consilium.errors import StudyError
from consilium.method import Maybe, Method
from consilium.methods import METHODS
from consilium.methods.fedsm import FedSM
from consilium.methods.ufps_modules import TeacherUncertainty
from consilium.site import SiteCard
from consilium.timeline import timeline
from consilium.weights import Weights
from tests.learning.small import Line, line, value
from tests.toy import toy_study

N = {"ada": 1, "bea": 2, "cid": 6}
SENT = {"ada": 9.0, "bea": 0.0, "cid": 3.0}
BY_HAND = {"cases": (1 * 9 + 2 * 0 + 6 * 3) / 9, "uniform": (9 + 0 + 3) / 3}
ROSTER = {name: SiteCard(name, i, n, ("blob",)) for i, (name, n) in enumerate(N.items())}
WITH = [name for name, kind in METHODS.items() if any(f.name == "shares" for f in fields(kind))]
UNETS = ("dod", "fedcrld", "menu-net")  # they change the network inside, and their own tests show the average
# a line has neither a decoder nor normalisation
WHOLE = {
    "ufps": {"uncertainty": TeacherUncertainty(parts="whole")},
    **{n: {"local_part": "none"} for n in WITH if hasattr(METHODS[n], "local_part")},
}


def test_it_is_a_field_of_fedavg_and_its_kin() -> None:
    """The others' papers say how they average: SCAFFOLD, Per-FedAvg and pFedMe uniformly."""
    assert WITH == [
        "fedavg", "fedprox", "fedasam", "fedsm", "fedsm-extra", "fedsm-ensemble", "fedavg-finetune",
        "fedprox-finetune", "fedavg-local", "apfl", "fedavg-pl", "fedprox-pl", "moon-pl", "fedalign-pl", "fedasam-pl",
        "cps-pl", "ms-kd-pl", "ufps",
        "fedavg-foreground", "cond-dec", "fedbn", "multi-head", "multi-encoder", "multi-decoder", "dod", "fedcrld",
        "menu-net",
    ]  # fmt: skip


@pytest.mark.parametrize("shares", BY_HAND)
@pytest.mark.parametrize("name", [name for name in WITH if name not in UNETS])
def test_the_average_by_hand(name: str, shares: str) -> None:
    """9, 0 and 3 from sites of 1, 2 and 6 cases: 3 by cases, 4 uniformly."""
    made: Any = METHODS[name]
    method: Method = made(shares=shares, **WHOLE.get(name, {}))
    round = next(round for phase, round in timeline(method, 6) if phase.counts)
    replies = {}
    for site, w in SENT.items():
        sent = method.blank(Line(), ROSTER, ROSTER[site], round)
        empty = {f.name: zeros(getattr(sent, f.name)) for f in fields(sent)}
        replies[site] = replace(sent, **{**empty, "global_": line(w), "steps": 1})
    merged = method.merge(method.start(Line(), ROSTER), replies, round)
    assert value(merged.global_) == pytest.approx(BY_HAND[shares])


def zeros(part: Any) -> Any:
    """A field of an uplink that was only described, with numbers."""
    if isinstance(part, Weights):
        return Weights({name: torch.zeros(tensor.shape) for name, tensor in part.items()})
    return None if isinstance(part, Maybe) else part


def test_sites_that_are_away_have_no_share() -> None:
    made: Any = METHODS["fedavg"](shares="uniform")  # type: ignore[call-arg]
    replies = {name: made.Uplink(line(SENT[name]), 0.0, 1) for name in ("ada", "cid")}
    merged = made.merge(made.Server(line(0.0), N), replies, timeline(made, 1)[0][1])
    assert value(merged.global_) == pytest.approx((9 + 3) / 2)


@pytest.mark.parametrize("name", WITH)
def test_another_value_is_refused(name: str, federation: Path) -> None:
    with pytest.raises(StudyError, match=r"\[method\] shares = 'n': it must be one of cases, uniform\."):
        toy_study(federation, name, method__shares="n")


def test_partners_of_fedsm_have_none_of_their_own() -> None:
    with pytest.raises(StudyError, match="'shares' is FedSM's own here; write it in \\[method\\]"):
        FedSM(personal="finetune", personal_fields={"shares": "uniform"})


def test_a_run_with_uniform_shares_is_another_run(federation: Path, tmp_path: Path) -> None:
    runs = {
        shares: run_in_process(toy_study(federation, "fedavg", method__shares=shares, study__rounds=1), tmp_path)
        for shares in BY_HAND
    }
    assert state(runs["cases"]) != state(runs["uniform"])
