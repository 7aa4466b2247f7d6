"""FedAvg: w = Σ (n_k / n) w_k over the sites that answered."""

from __future__ import annotations

import pytest

from consilium.methods.fedavg import FedAvg
from consilium.site import SiteCard
from tests.learning.small import FIRST, Line, batch, line, site, value

N = {"ada": 1, "bea": 2, "cid": 6}


def reply(w: float) -> FedAvg.Uplink:
    return FedAvg.Uplink(line(w), 0.0, 1)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"ada": 9.0, "bea": 0.0, "cid": 3.0}, (1 * 9 + 2 * 0 + 6 * 3) / 9),
        ({"ada": 9.0, "bea": 0.0}, (1 * 9 + 2 * 0) / 3),  # shares are over those who answered
        ({"bea": 5.0}, 5.0),
    ],
    ids=["all", "two", "one"],
)
def test_the_mean_by_cases_of_those_who_answered(answers: dict[str, float], expected: float) -> None:
    server = FedAvg().merge(FedAvg.Server(line(100.0), N), {k: reply(w) for k, w in answers.items()}, FIRST)
    assert value(server.global_) == pytest.approx(expected)
    assert server.n == N


def test_a_round_by_hand() -> None:
    """Everyone starts at w = 2. ada (x = 3, t = 1) goes to .5, bea (x = 1, t = 0) to 1.8; 1 and 2 cases: 41/30."""
    method = FedAvg()
    sites = {
        "ada": site(batch([3.0], [1.0]), name="ada", roster=["ada", "bea"]),
        "bea": site(batch([1.0, 1.0], [0.0, 0.0]), name="bea", roster=["ada", "bea"]),
    }
    server = FedAvg.Server(line(2.0), {"ada": 1, "bea": 2})
    order = method.send(server, SiteCard("ada", 0, 1, ()), FIRST)
    assert order == FedAvg.Downlink(server.global_)
    replies = {}
    for name, here in sites.items():
        replies[name], _ = method.train(here, method.remember(here), order, FIRST)
    assert {name: value(r.global_) for name, r in replies.items()} == pytest.approx({"ada": 0.5, "bea": 1.8})
    assert (replies["ada"].loss, replies["ada"].steps) == (12.5, 1)
    assert value(method.merge(server, replies, FIRST).global_) == pytest.approx((0.5 + 2 * 1.8) / 3)


def test_it_starts_from_the_seeded_weights_and_the_rosters_cases() -> None:
    roster = {name: SiteCard(name, i, n, ()) for i, (name, n) in enumerate(N.items())}
    server = FedAvg().start(Line(), roster)
    assert server.global_.digest == Line().initial().digest
    assert server.n == N


def test_the_release_is_the_same_for_everyone() -> None:
    server = FedAvg.Server(line(4.0), N)
    inside, outside = FedAvg().release(server, SiteCard("ada", 0, 1, ())), FedAvg().release(server, None)
    assert inside == outside
    assert FedAvg().deploy(Line(), None, inside).model == "global"
