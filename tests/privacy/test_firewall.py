"""Sites that lie are found out and treated as if away; honest ones, however odd, are not. What it rests on, by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.cli.progress import ProgressDisplay
from consilium.contract import Interrupted, crash_after, run_in_process, state
from consilium.errors import StudyError
from consilium.methods import METHODS
from consilium.privacy.firewall import Firewall, Verdict, judged
from consilium.privacy.measuring import Update, cosines, updates_of
from consilium.privacy.past import EMPTY, History
from consilium.reports.page import write_page
from consilium.reports.reading import read_run
from consilium.run_folder import RunFolder
from consilium.site import SiteCard
from consilium.study import Study
from consilium.study_reading import make_study
from consilium.tree import message
from consilium.weights import Weights
from tests.privacy.liars import LIES, run_lying, scale, shift
from tests.toy import toy_study

HONEST = 5  # rounds before the first lie
ROUNDS = HONEST + len(LIES)
LYING = {HONEST + 1 + i: lie for i, lie in enumerate(LIES.values())}


def events(folder: RunFolder, kind: str) -> list[Any]:
    return [event for event in folder.events() if event["event"] == kind]


def guarded(federation: Path, method: str = "fedavg", rounds: int = ROUNDS, mode: str = "refuse", **more: Any) -> Study:
    plan = {"study__rounds": rounds, "study__score_every": rounds, "study__firewall": mode}
    return toy_study(federation, method, **plan, **({"local__batch_size": 4} | more))


# ------------------------------------------------------------------------------------------- sites that lie


@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedsm", "apple"))]
)
def test_a_liar_is_found_out(method: str, federation: Path, tmp_path: Path) -> None:
    """Five honest rounds, then a lie in every round, each of another kind; nobody else is suspected."""
    told = {name: lie for name, lie in LIES.items() if (method, name) != ("scaffold", "flipped")}  # it turns by itself
    lying = {HONEST + 1 + i: lie for i, lie in enumerate(told.values())}
    folder = run_lying(guarded(federation, method, HONEST + len(lying)), tmp_path, "cid", lying)
    refused = {(event["round"], event["site"]) for event in events(folder, "refused")}
    assert refused == {(round, "cid") for round in lying}, dict(zip(lying, told))


def test_a_site_that_was_refused_is_as_if_away(federation: Path, tmp_path: Path) -> None:
    """Its memory too: a lie in round 6, an honest round 7."""
    study = guarded(federation, "scaffold", rounds=7)
    folder = run_lying(study, tmp_path / "lying", "cid", {6: LIES["scaled by 10"]})
    assert [event["round"] for event in events(folder, "refused")] == [6]
    away = guarded(federation, "scaffold", rounds=7, study__away={"cid": [6]})
    assert state(folder) == state(run_in_process(away, tmp_path / "away"))


@pytest.mark.parametrize("lie", ["scaled by 10", "scaled by 100", "negated", "shifted by 0.1"])
def test_a_liar_from_the_first_round_is_found_out_by_the_others(lie: str, federation: Path, tmp_path: Path) -> None:
    study = guarded(federation, rounds=2)
    folder = run_lying(study, tmp_path, "ada", dict.fromkeys((1, 2), LIES[lie]))
    assert [(event["round"], event["site"]) for event in events(folder, "refused")] == [(1, "ada"), (2, "ada")]


def test_the_reason_is_said_with_its_figures(federation: Path, tmp_path: Path) -> None:
    lies = {HONEST + 1: scale(100.0), HONEST + 2: scale(-1.0), HONEST + 3: shift(1.0)}
    folder = run_lying(guarded(federation, rounds=HONEST + 3), tmp_path, "cid", lies)
    long, flipped, shifted = events(folder, "refused")
    assert "times as long as the site's updates usually are" in long["why"]
    assert 50 < long["firewall"]["figures"]["global"]["times_own"] < 200
    assert "'global' points against the site's earlier updates (cosine -0." in flipped["why"]
    assert "'global' is shifted by a constant, " in shifted["why"]
    accepted = events(folder, "train")
    assert {event["firewall"]["verdict"] for event in accepted} == {"accepted"}
    assert all(event["firewall"]["figures"]["global"]["length"] > 0 for event in accepted)
    write_page([read_run(folder.path)], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Rejected updates and outliers" in page
    assert "<td>6, 7, 8</td>" in page


def test_a_resumed_run_decides_alike(federation: Path, tmp_path: Path) -> None:
    """Its past is saved with the state: a crash after the honest rounds and one among the lies change nothing."""
    study = guarded(federation)
    whole = run_lying(study, tmp_path / "whole", "cid", LYING)
    kept: Any = {}
    for round in (HONEST, HONEST + 3):
        with pytest.raises(Interrupted):
            run_lying(study, tmp_path / "cut", "cid", LYING, kept, crash_after("round", round))
    resumed = run_lying(study, tmp_path / "cut", "cid", LYING, kept)
    assert state(resumed) == state(whole)
    said = [[(e["round"], e["site"], e["firewall"]) for e in events(f, "refused")] for f in (whole, resumed)]
    assert said[0] == said[1]
    assert len(said[0]) == len(LIES)


def test_to_observe_changes_nothing_but_says_it(federation: Path, tmp_path: Path) -> None:
    lies = {HONEST + 1: scale(100.0)}
    runs = {
        mode: run_lying(guarded(federation, rounds=HONEST + 1, mode=mode), tmp_path / mode, "cid", lies)
        for mode in ("off", "observe")
    }
    assert state(runs["off"]) == state(runs["observe"])
    odd = [e for e in events(runs["observe"], "train") if e["firewall"]["verdict"] == "odd"]
    assert [(event["round"], event["site"]) for event in odd] == [(HONEST + 1, "cid")]
    assert "times as long" in odd[0]["firewall"]["why"]
    assert not any("firewall" in event for event in events(runs["off"], "train"))
    assert not events(runs["observe"], "refused")


def test_progress_names_what_was_left_out_and_what_was_odd(capsys: pytest.CaptureFixture[str]) -> None:
    start = {"event": "start", "method": "fedavg", "rounds": 9, "round": 0, "aside": [], "sites": {"ada": 8}}
    place = {"round": 7, "phase": "train", "site": "ada", "loss": 0.5}
    with ProgressDisplay() as progress:
        progress.show(start)
        progress.show({"event": "refused", **place, "why": "it is too long", "firewall": {"verdict": "refused"}})
        progress.show({"event": "train", **place, "firewall": {"verdict": "odd", "why": "it is turned"}})
        progress.show({"event": "train", **place, "firewall": {"verdict": "accepted"}})
        progress.show({"event": "privacy", "epsilon": 1.2345, "delta": 1e-5, "rounds": 9})
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == [
        "round 7: ada was rejected: it is too long",
        "round 7: ada sent an outlier, which was merged: it is turned",
        "note: differential privacy of every site's training cases: ε 1.23 at δ 1e-05 over 9 rounds",
    ]


# ------------------------------------------------------------------------------------------- settings


def test_the_mode_alone_will_do(federation: Path) -> None:
    short = toy_study(federation, study__firewall="refuse")
    long = toy_study(federation, study__firewall={"mode": "refuse"})
    assert short.plan.firewall == Firewall("refuse")
    assert short.hash == long.hash
    assert make_study(short.tables()).hash == short.hash


def test_settings_of_rules_that_are_gone_are_read_and_change_nothing(federation: Path) -> None:
    today = toy_study(federation, study__firewall="refuse")
    before = toy_study(federation, study__firewall={"mode": "refuse", "against": 0.3, "likeness": 0.95})
    assert (before.plan.firewall, before.hash) == (today.plan.firewall, today.hash)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("refused", r"\[study.firewall\] mode = 'refused': it must be one of off, observe, refuse\."),
        ({"sigma": 3}, r"\[study.firewall\] has no key 'sigma'; did you mean 'sigmas'\?"),
        ({"times": "many"}, r"\[study.firewall\] times = 'many': it must be a number\."),
        ({"shift": 1.5}, r"\[study.firewall\] shift = 1.5: it must be in \[0, 1\)\."),
        ({"sigmas": 0}, r"\[study.firewall\] sigmas must be at least 1"),
        (3, r"\[study\] firewall = 3: it must be a table\."),
    ],
)
def test_wrong_settings_are_refused(value: Any, words: str, federation: Path) -> None:
    with pytest.raises(StudyError, match=words):
        toy_study(federation, study__firewall=value)


# ------------------------------------------------------------------------------------------- by hand


@message
class Reply:
    """One part of every kind."""

    model: Weights
    change: Weights
    mask: torch.Tensor
    loss: float


def model(*values: float) -> Weights:
    return Weights({"a": torch.tensor(values), "count": torch.tensor(7)})


def test_an_update_is_measured_from_where_the_site_began() -> None:
    """(3, 4, 0) − (0, 0, 0) has length 5 and constant part (7/3, …), 7/√3/5 of it; the counter does not count."""
    reply = Reply(model(4.0, 5.0, 1.0), model(0.0, 0.0, 0.0), torch.tensor([True, False]), 1.0)
    found = updates_of(reply, {"model": model(1.0, 1.0, 1.0)})
    assert sorted(found) == ["model"]  # what stayed as it was says nothing, and no rule fits a mask
    assert found["model"].length == pytest.approx(5.0)
    assert found["model"].shift == pytest.approx(7 / math.sqrt(3) / 5)


@pytest.mark.parametrize("masks", [([True, False], [False, True]), ([True, False], [True, False])], ids=["new", "same"])
def test_a_mask_of_the_same_number_of_weights_is_no_repeated_update(masks: tuple[list[bool], list[bool]]) -> None:
    """UFPS's masks choose the same share of all weights every time, so they are equally long, and may well be equal."""
    history, roster = EMPTY, {"a": SiteCard("a", 0, 10, ())}
    for step, mask in enumerate(masks):
        reply = Reply(model(1.0 + step, 2.0, 3.0), model(0.0, 0.0, 0.0), torch.tensor(mask), 1.0)
        found = {"a": updates_of(reply, {"model": model(0.5, 1.0, 1.0)})}
        verdicts, history = judged(Firewall(), history, found, roster, "train")
        assert verdicts["a"].why == ""


def test_sketches_tell_directions() -> None:
    """Of vectors of 200 000 values at a known angle; one sketch is good to about 1/16."""
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(200_000, generator=draw), torch.randn(200_000, generator=draw)
    zero = Weights({"a": torch.zeros(200_000)})
    for true in (-1.0, -0.5, 0.0, 0.5, 0.9, 1.0):
        mixed = true * a + math.sqrt(1 - true**2) * b
        one, two = (updates_of(Reply(Weights({"a": t}), zero, torch.zeros(0), 0.0), {})["model"] for t in (a, mixed))
        assert cosines(one.sketch[None], two.sketch)[0] == pytest.approx(true, abs=0.15 * (1 - true**2) + 1e-6)


def update(direction: torch.Tensor, length: float) -> Update:
    vector = direction / direction.norm() * length
    start = Weights({"a": torch.zeros(len(vector))})
    return updates_of(Reply(Weights({"a": vector}), start, torch.zeros(0), 0.0), {"model": start})["model"]


class Play:
    """Rounds of made-up updates of a shared model at sites with 10 cases each, through the firewall."""

    def __init__(self, sites: str = "abcd", steady: bool = True) -> None:
        self.steady = steady
        self.draw = torch.Generator().manual_seed(1)
        self.common = self.noise()
        self.history: History = EMPTY
        self.roster = {name: SiteCard(name, i, 10, ()) for i, name in enumerate(sites)}

    def noise(self) -> torch.Tensor:
        return torch.randn(3000, generator=self.draw)

    def honest(self, length: float = 1.0) -> Update:
        return update(self.common + self.noise(), length)

    def round(self, **special: Update) -> Mapping[str, Verdict]:
        updates = {name: {"model": special.get(name) or self.honest()} for name in self.roster}
        verdicts, self.history = judged(Firewall(), self.history, updates, self.roster, "train", self.steady)
        return verdicts

    def odd(self, **special: Update) -> dict[str, str]:
        return {name: verdict.why for name, verdict in self.round(**special).items() if verdict.why}


def test_an_honest_site_that_is_always_longer_and_turned_is_not_odd() -> None:
    """Three times the others' length, at a right angle to them, for 60 rounds."""
    play, own = Play(), torch.randn(3000, generator=torch.Generator().manual_seed(2))
    assert [play.odd(d=update(own + play.noise(), 3.0)) for _ in range(60)] == [{}] * 60


def test_an_honest_site_that_begins_to_learn_late_is_not_odd() -> None:
    """As the smallest site of APPLE on all of CIFAR-10: at rest for five rounds, then up to 350 times as long."""
    play = Play()
    for length in (0.0005, 0.002, 0.004, 0.006, 0.008, 0.04, 0.1, 0.3, 0.4, 0.8, 1.0, 1.2, 1.3, 0.9, 0.3, 0.1):
        assert play.odd(d=play.honest(length)) == {}, length
    assert set(play.odd(d=play.honest(20.0))) == {"d"}  # longer than anyone ever was
    assert set(play.odd(c=play.honest(20.0), d=play.honest(0.1))) == {"c"}


def test_a_site_that_has_learned_is_held_against_itself() -> None:
    """Late in training all updates are short; one as long as those of the first round is odd."""
    play = Play()
    for length in (1.0, 0.5, 0.2, 0.1, *[0.01] * 10):
        assert play.odd(**{name: play.honest(length) for name in "abcd"}) == {}
    late = {name: play.honest(0.01) for name in "abc"}
    assert set(play.odd(**late, d=play.honest(1.0))) == {"d"}


@pytest.mark.parametrize("sites", ["a", "ab"])
def test_a_site_without_enough_others_is_held_against_itself(sites: str) -> None:
    play = Play(sites)
    for _ in range(6):
        assert play.odd() == {}
    assert set(play.odd(a=play.honest(30.0))) == {"a"}
    assert set(play.odd(a=update(-play.common + play.noise(), 1.0))) == {"a"}


def test_what_has_no_usual_direction_cannot_be_turned_round() -> None:
    """As the change of a control variate, every one of which undoes a part of the last."""
    play, before = Play(), torch.zeros(3000)
    for _ in range(20):
        now = play.noise()
        assert play.odd(c=update(now - before, 1.0)) == {}
        before = now


@pytest.mark.parametrize("steady", [True, False])
def test_a_method_that_turns_honest_updates_is_not_judged_by_direction(steady: bool) -> None:
    """Under SCAFFOLD a site that turned once would be refused in every later round: its past would stay what it was."""
    play = Play(steady=steady)
    for _ in range(6):
        assert play.odd() == {}
    turned = play.odd(c=update(-play.common + play.noise(), 1.0))
    assert set(turned) == ({"c"} if steady else set())
    assert set(play.odd(c=play.honest(200.0))) == {"c"}


def test_only_scaffold_turns_honest_updates() -> None:
    assert [name for name, kind in METHODS.items() if not kind.steady] == ["scaffold"]


def test_a_schedule_that_lengthens_all_is_nobodys_fault() -> None:
    play = Play()
    for _ in range(6):
        assert play.odd() == {}
    assert play.odd(**{name: play.honest(12.0) for name in "abcd"}) == {}
    assert set(play.odd(c=play.honest(200.0))) == {"c"}


def test_a_turn_that_half_of_the_others_make_is_nobodys_fault() -> None:
    """As under SCAFFOLD, when the control variates have caught up; a single site that turns is found out."""
    play = Play("abc")
    for _ in range(6):
        assert play.odd() == {}
    against = {name: update(play.noise() - play.common, 1.0) for name in "abc"}
    assert set(play.odd(c=against["c"])) == {"c"}
    assert play.odd(b=against["b"], c=against["c"]) == {}


def test_updates_that_become_alike_are_not_odd_but_the_same_one_is() -> None:
    """With its optimiser's state kept, a site's updates resemble each other more and more (cosine 0.99 here)."""
    play = Play()
    for number in range(12):
        last = play.common + 0.1 * play.noise()
        assert play.odd(c=update(last, 3.0 / (number + 1))) == {}
    assert set(play.odd(c=update(last, 3.0 / 12))) == {"c"}


def test_newcomers_do_not_count_among_those_who_turned() -> None:
    play = Play("abcdefgh")
    for _ in range(6):
        play.round()
    newcomers = {f"new{i}": SiteCard(f"new{i}", 8 + i, 10, ()) for i in range(8)}
    play.roster = {name: play.roster[name] for name in "ab"} | newcomers
    turned = {name: update(play.noise() - play.common, 1.0) for name in "ab"}
    assert {"a", "b"} <= set(play.odd(**turned))


def test_a_refused_update_leaves_no_trace() -> None:
    play = Play()
    for _ in range(6):
        play.round()
    before = play.history.of("train", "c", "model")
    for _ in range(12):  # however often it is tried, it does not become usual
        assert set(play.odd(c=play.honest(30.0))) == {"c"}
    assert play.history.of("train", "c", "model") is before
    assert len(play.history.of("train", "a", "model").lengths) == 18


def test_a_short_update_is_not_odd() -> None:
    play = Play()
    for _ in range(6):
        play.round()
    assert play.odd(c=play.honest(1e-4)) == {}
