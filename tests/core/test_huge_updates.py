"""A huge update that is finite spoils nobody's model: it is left out, or the run stops before anything is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from consilium.errors import WorkError
from consilium.intake import STATE, new_parts, spoilt
from consilium.method import GlobalModel
from consilium.privacy.firewall import Firewall, judged
from consilium.privacy.measuring import WIDTH, Update
from consilium.privacy.past import EMPTY
from consilium.run_folder import RunFolder
from consilium.site import SiteCard
from consilium.study import Study
from consilium.weights import Weights
from consilium.wires.site_wire import Returned
from tests.core.lying import Lie, events, largest, run_with
from tests.core.lying import scaled as times
from tests.toy import toy_study


def study_of(federation: Path, **changes: object) -> Study:
    return toy_study(federation, "fedavg", study__rounds=2, study__score_every=2, **changes)


def huge(factor: float, which: int = 1) -> Lie:
    """`bea` multiplies its first update; its first answer is its card."""

    def lie(site: str, count: int, answer: Returned) -> Returned:
        return times(answer, factor) if (site, count) == ("bea", which) and answer.packet else answer

    return lie


def test_an_absurd_update_is_left_out_though_the_firewall_only_observes(federation: Path, tmp_path: Path) -> None:
    folder = run_with(study_of(federation), tmp_path, huge(1e12))
    [refused] = events(folder, "refused")
    assert (refused["site"], refused["round"]) == ("bea", 1)
    assert "times as long as the others' updates" in refused["why"]
    assert [e["site"] for e in events(folder, "train") if e["round"] == 2] == ["ada", "bea", "cid"]
    assert largest(folder) < 1e3


def test_what_is_only_odd_is_merged_and_said(federation: Path, tmp_path: Path) -> None:
    folder = run_with(study_of(federation), tmp_path, huge(30.0))
    assert events(folder, "refused") == []
    [odd] = [e for e in events(folder, "train") if e.get("firewall", {}).get("verdict") == "odd" and e["round"] == 1]
    assert odd["site"] == "bea"


@pytest.mark.parametrize("changes", [{"study__firewall": "off"}, {"study__sites": ["ada", "bea"]}])
def test_a_merged_state_that_nobody_could_go_on_from_is_not_kept(
    federation: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Without a firewall, or with two sites of which nobody can say who is right."""
    study = study_of(federation, **changes)
    with pytest.raises(WorkError) as error:
        run_with(study, tmp_path, huge(1e14))
    assert str(error.value).startswith("round 1: the merged state holds values up to ")
    assert "Of the replies' values bea's reach " in str(error.value)
    [path] = RunFolder.attempts(study, tmp_path)
    folder = RunFolder.open(path)
    assert folder.states.resume(study.method) is None  # nothing of it was committed
    assert run_with(study, tmp_path, lambda site, count, answer: answer).finished  # and the run can go on


def update(length: float, sent: float, started: bool) -> Update:
    return Update(length, 0.0, torch.ones(WIDTH), str(length), sent * 2.0**-23, started)


@pytest.mark.parametrize(
    ("own", "absurd"),
    [
        (update(1e5, 1e5, True), True),  # nothing is left of a model of length 10
        (update(1.0, 10.0, True), False),  # the others have come to rest, and this site goes on learning
        (update(1e3, 1e3, False), False),  # a gradient, where the others' are nearly nothing
        (update(1e9, 1e9, False), True),
    ],
)
def test_what_is_long_only_beside_updates_of_nearly_nothing_is_not_absurd(own: Update, absurd: bool) -> None:
    roster = {name: SiteCard(name, i, 8, ("blob",)) for i, name in enumerate(("ada", "bea", "cid"))}
    calm = update(1e-6, 10.0, own.started)
    told = {"ada": {"part": calm}, "bea": {"part": own}, "cid": {"part": calm}}
    verdicts, _ = judged(Firewall(), EMPTY, told, roster, "train")
    assert "times as long as the others' updates" in verdicts["bea"].why
    assert {name: verdict.absurd for name, verdict in verdicts.items()} == {"ada": False, "bea": absurd, "cid": False}


def test_only_what_is_new_in_a_state_is_looked_at() -> None:
    old = Weights({"a": torch.tensor([2 * STATE])})
    new = Weights({"a": torch.tensor([1.0, -STATE]), "n": torch.tensor(1 << 60)})
    state = GlobalModel.Server

    def fault(merged: Weights, before: Weights) -> str:
        return spoilt(new_parts(state(merged, {}), state(before, {})))

    assert fault(old, old) == ""
    assert fault(new, old) == ""
    assert fault(old, new) == "holds values up to 2e+12"
    for wrong in (float("nan"), float("inf"), -float("inf")):
        assert fault(Weights({"a": torch.tensor([0.0, wrong])}), new) == "is not finite"
