"""SCAFFOLD, option II with plain SGD: y ← y − η (g − c_i + c), c_i ← c_i − c + (x − y)/(K η)."""

from __future__ import annotations

from typing import Any

import pytest

from consilium.errors import StudyError
from consilium.local_training import Local
from consilium.methods.scaffold import Scaffold
from consilium.site import Round, Site
from tests.learning.small import FIRST, batch, line, site, value

PLAIN = Local(optimizer="sgd", momentum=0.0, lr=0.1)


def test_one_step_by_hand() -> None:
    """x = 2, g = 15, c_i = 4, c = 1, η = .1: y = 2 − .1·(15 − 4 + 1) = .8, and c_i becomes 4 − 1 + 1.2/.1 = 15 = g."""
    here = site(batch([3.0], [1.0]))
    uplink, memory = Scaffold().train(here, Scaffold.Memory(line(4.0)), Scaffold.Downlink(line(2.0), line(1.0)), FIRST)
    assert value(uplink.global_) == pytest.approx(0.8)
    assert value(memory.c) == pytest.approx(15.0, abs=1e-4)
    assert value(uplink.c_change) == pytest.approx(11.0, abs=1e-4)


def test_steps_are_counted_not_epochs() -> None:
    """Two batches, two epochs: K = 4. With c = c_i = 0 the new c_i is the mean of the four gradients."""
    here = site(batch([1.0], [0.0]), batch([1.0], [0.0]), epochs=2)
    uplink, memory = Scaffold().train(here, Scaffold.Memory(line(0.0)), Scaffold.Downlink(line(1.0), line(0.0)), FIRST)
    gradients = [1.0, 0.9, 0.81, 0.729]
    assert uplink.steps == 4
    assert value(memory.c) == pytest.approx(sum(gradients) / 4, abs=1e-5)


def test_the_methods_own_rate_and_a_schedule_scale_the_variate() -> None:
    """At another rate the first c_i is still the gradient, 15: (x − y)/(K η) must use the rate of the steps."""
    for method, here in (
        (Scaffold(lr=0.01), site(batch([3.0], [1.0]))),
        (Scaffold(), site(batch([3.0], [1.0]), schedule="decay", decay=0.5)),
    ):
        order = Scaffold.Downlink(line(2.0), line(0.0))
        _, memory = method.train(here, Scaffold.Memory(line(0.0)), order, Round(3, "train", 3, 9))
        assert value(memory.c) == pytest.approx(15.0, abs=1e-3)


def test_the_server_by_hand() -> None:
    """Three sites, two answer: x is the plain mean of y, c moves by 2/3 of the mean change."""
    server = Scaffold.Server(line(9.0), line(1.0), 3)
    replies = {
        "ada": Scaffold.Uplink(line(2.0), line(3.0), 0.0, 1),
        "bea": Scaffold.Uplink(line(4.0), line(6.0), 0.0, 1),
    }
    merged = Scaffold().merge(server, replies, FIRST)
    assert value(merged.global_) == 3.0
    assert value(merged.c) == pytest.approx(1 + 2 / 3 * 4.5)
    assert merged.sites == 3


class Rounds:
    """Two sites whose data disagree, round by round."""

    def __init__(self) -> None:
        roster = ["ada", "bea"]
        self.sites: dict[str, Site] = {
            "ada": site(batch([1.0], [3.0]), batch([2.0], [1.0]), name="ada", roster=roster),
            "bea": site(batch([1.0], [-2.0]), name="bea", roster=roster),
        }
        self.server: Any = Scaffold.Server(line(0.0), line(0.0), 2)
        self.memory: dict[str, Any] = {name: Scaffold.Memory(line(0.0)) for name in self.sites}

    def play(self, *names: str) -> None:
        order = Scaffold().send(self.server, self.sites["ada"].card, FIRST)
        replies = {}
        for name in names:
            replies[name], self.memory[name] = Scaffold().train(self.sites[name], self.memory[name], order, FIRST)
        self.server = Scaffold().merge(self.server, replies, FIRST)

    def gap(self) -> float:
        return value(self.server.c) - sum(value(memory.c) for memory in self.memory.values()) / 2


def test_c_is_the_mean_of_the_sites_after_every_round() -> None:
    rounds = Rounds()
    for names in (("ada", "bea"), ("ada", "bea"), ("ada",), ("ada", "bea"), ("bea",)):
        rounds.play(*names)
        assert rounds.gap() == pytest.approx(0.0, abs=1e-6)


def test_an_absent_site_keeps_its_variate() -> None:
    rounds = Rounds()
    rounds.play("ada", "bea")
    before = rounds.memory["bea"].c.digest
    rounds.play("ada")
    assert rounds.memory["bea"].c.digest == before


@pytest.mark.parametrize(
    "local",
    [
        {"optimizer": "adam"},
        {"optimizer": "adamw"},
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.1},
    ],
)
def test_anything_but_plain_sgd_is_refused(local: dict[str, Any]) -> None:
    with pytest.raises(StudyError, match=r"plain SGD; set local.optimizer = 'sgd', local.momentum = 0, "):
        Scaffold().check(None, {}, Local(**local))  # type: ignore[arg-type]


def test_plain_sgd_is_accepted() -> None:
    assert Scaffold().check(None, {}, PLAIN) == []  # type: ignore[arg-type]
