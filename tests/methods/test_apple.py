"""APPLE: w_i = Σ_j p_ij c_j; ∂F/∂c_i = p_ii g and ∂F/∂p_ij = ⟨g, c_j⟩ + λ(r) μ (p_ij − p0_j), from the same batch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from consilium import packet_files
from consilium.contract import run_in_process, run_tampered
from consilium.errors import NotForOutsiders, StudyError
from consilium.local_norm import LocalNorm
from consilium.messages import Envelope, Reply
from consilium.methods.apple import APPLE, attraction, next_peers
from consilium.prediction import open_predictor
from consilium.run_folder import RunFolder
from consilium.site import Round, Site, SiteCard
from consilium.store import MemoryStore
from consilium.tree import flatten
from consilium.weights import Weights
from tests.learning.small import FIRST, Given, batch, line, site, value
from tests.toy import toy_study

TWO = ("ada", "bea")
FOUR = ("ada", "bea", "cid", "dan")
BATCH = batch([1.0], [0.0])  # loss w²/2, so g = w


def at(step: int, total: int = 10) -> Round:
    return Round(step, "train", step, total)


def memory_of(method: APPLE, here: Site, **cores: float) -> APPLE.Memory:
    return replace(method.remember(here), cores={name: line(w) for name, w in cores.items()})


def step(method: APPLE, here: Site, memory: APPLE.Memory, round: Round = FIRST, **got: float) -> Any:
    return method.train(here, memory, APPLE.Downlink({name: line(w) for name, w in got.items()}), round)


# ---------------------------------------------------------------------------------------------- one site's work


def test_one_step_by_hand() -> None:
    """c = 4, 2 and p = ½, ½: w = 3 = g; c_ada = 4 − .1·½·3, p = ½ − .01·3·4, ½ − .01·3·2."""
    method, here = APPLE(relation_lr=0.01), site(BATCH, roster=TWO)
    uplink, memory = step(method, here, memory_of(method, here, ada=4.0, bea=2.0))
    assert value(uplink.core) == value(memory.cores["ada"]) == pytest.approx(3.85)
    assert memory.p == pytest.approx({"ada": 0.38, "bea": 0.44})
    assert value(memory.cores["bea"]) == 2.0
    assert (uplink.loss, uplink.steps) == (pytest.approx(4.5), 1)
    assert memory.rounds == (0,)
    assert memory.history.tolist() == [pytest.approx([0.38, 0.44])]


def test_the_pull_towards_p0_has_half_of_mu() -> None:
    """At p = ½ there is none; the second batch adds λ μ (p − p0) with λ(1 of 4) at cosine (cos(π/4) + 1)/2."""
    method = APPLE(relation_lr=0.01, mu=5.0, scheduler_rounds=4)
    here = site(BATCH, BATCH, roster=TWO)
    _, memory = step(method, here, memory_of(method, here, ada=4.0, bea=2.0), at(1))
    pull = 5.0 * (2**-0.5 + 1) / 2
    w = 0.38 * 3.85 + 0.44 * 2.0
    p = {"ada": 0.38 - 0.01 * (w * 3.85 + pull * -0.12), "bea": 0.44 - 0.01 * (w * 2.0 + pull * -0.06)}
    assert memory.p == pytest.approx(p, rel=1e-5)


def test_momentum_is_on_both_and_forgotten_between_rounds() -> None:
    """Two steps of velocity v ← ½ v + slope; the next round starts without one."""
    method = APPLE(relation_lr=0.01, mu=0.0)
    here = site(BATCH, BATCH, roster=TWO, momentum=0.5)
    _, memory = step(method, here, memory_of(method, here, ada=4.0, bea=2.0))
    w = 0.38 * 3.85 + 0.44 * 2.0
    assert value(memory.cores["ada"]) == pytest.approx(3.85 - 0.1 * (0.5 * 1.5 + 0.38 * w))
    assert memory.p["ada"] == pytest.approx(0.38 - 0.01 * (0.5 * 12 + w * 3.85))
    once = replace(here, data=Given((BATCH,)))
    c, p = value(memory.cores["ada"]), memory.p
    _, after = step(method, once, memory, at(1))
    w = p["ada"] * c + p["bea"] * 2.0
    assert value(after.cores["ada"]) == pytest.approx(c - 0.1 * p["ada"] * w)
    assert after.p["ada"] == pytest.approx(p["ada"] - 0.01 * w * c)


def test_both_learning_rates_decay() -> None:
    """By ½ per round: in round 2 a quarter of each step."""
    method = APPLE(relation_lr=0.01, mu=0.0)
    here = site(BATCH, roster=TWO, schedule="decay", decay=0.5)
    _, memory = step(method, here, memory_of(method, here, ada=4.0, bea=2.0), at(2))
    assert value(memory.cores["ada"]) == pytest.approx(4.0 - 0.15 / 4)
    assert memory.p == pytest.approx({"ada": 0.5 - 0.12 / 4, "bea": 0.5 - 0.06 / 4})


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_any_optimizer_moves_both_downhill_and_weight_decay_spares_p(optimizer: str) -> None:
    method = APPLE(relation_lr=0.01, mu=0.0)
    here = site(BATCH, roster=TWO, optimizer=optimizer, weight_decay=0.5, lr=0.01)
    _, memory = step(method, here, memory_of(method, here, ada=4.0, bea=2.0))
    assert value(memory.cores["ada"]) < 4.0
    expected = {"ada": 0.49, "bea": 0.49} if optimizer != "sgd" else {"ada": 0.38, "bea": 0.44}
    assert memory.p == pytest.approx(expected, abs=1e-6)


def test_p_starts_at_the_shares_of_cases_and_stays_there_at_rate_zero() -> None:
    here = site(BATCH, roster=TWO)
    cards = {name: replace(here.roster[name], n=n) for name, n in (("ada", 30), ("bea", 10))}
    here = replace(here, roster=cards)
    method = APPLE(relation_lr=0.0)
    memory = method.remember(here)
    assert memory.p == {"ada": 0.75, "bea": 0.25}
    assert step(method, here, memory)[1].p == {"ada": 0.75, "bea": 0.25}


LAMBDA = [
    ("cosine", 4, 10, [1.0, (2**-0.5 + 1) / 2, 0.5, (1 - 2**-0.5) / 2, 0.0, 0.0]),
    ("exponential", 3, 10, [1.0, 0.1, 0.01, 0.0, 0.0]),
    ("exponential", 0.3, 10, [1.0, 0.1, 0.01, 0.0, 0.0]),
    ("cosine", 0.2, 10, [1.0, 0.5, 0.0]),
    ("cosine", 0, 10, [0.0, 0.0]),
]


@pytest.mark.parametrize(("kind", "rounds", "total", "expected"), LAMBDA)
def test_the_scheduler_fades_from_one_to_exactly_zero(
    kind: str, rounds: float, total: int, expected: list[float]
) -> None:
    method = APPLE(scheduler=kind, scheduler_rounds=rounds)
    found = [method.penalty_factor(at(r, total)) for r in range(len(expected))]
    assert found == pytest.approx(expected)
    assert [f == 0 for f in found] == [e == 0 for e in expected]


def test_cores_start_different_or_the_same_and_alike_everywhere() -> None:
    here = site(BATCH, roster=FOUR)
    for kind, number in (("different", 4), ("same", 1)):
        method = APPLE(core_init=kind)
        server = method.start(here.task, here.roster)
        assert len({core.digest for core in server.cores.values()}) == number
        memory = method.remember(here)
        assert {n: c.digest for n, c in memory.cores.items()} == {n: c.digest for n, c in server.cores.items()}
        assert method.send(server, here.card, FIRST).cores == {}


# ---------------------------------------------------------------------------------------------- the budget


def test_the_chances_of_a_peer_are_the_papers() -> None:
    """r M / N = 80 · 2 / 4 = 40: 40^.5, 40^.25 and 40^0, of their sum; early on the base is 1.5."""
    raw = torch.tensor([40**0.5, 40**0.25, 1.0], dtype=torch.float64)
    assert torch.allclose(attraction([-0.5, 0.25, 0.0], 80, 2, 4), raw / raw.sum())
    raw = torch.tensor([1.5**0.5, 1.0], dtype=torch.float64)
    assert torch.allclose(attraction([0.5, 0.0], 1, 2, 4), raw / raw.sum())


def test_peers_never_downloaded_come_first() -> None:
    here, p = site(BATCH, roster=FOUR), dict.fromkeys(FOUR, 0.25)
    for step in range(20):
        assert next_peers(p, here, ("bea", "cid"), 1, at(step)) == ("dan",)
        wants = next_peers(p, here, ("bea",), 2, at(step))
        assert wants == ("cid", "dan")
    assert {next_peers(p, here, (), 1, at(step)) for step in range(40)} == {("bea",), ("cid",), ("dan",)}


def test_then_they_are_drawn_by_the_size_of_p() -> None:
    here = site(BATCH, roster=FOUR)
    p = {"ada": 9.0, "bea": -2.0, "cid": 1.0, "dan": 0.0}
    draws = [next_peers(p, here, ("bea", "cid", "dan"), 1, Round(i, "train", 39, 100)) for i in range(600)]
    shares = [draws.count((name,)) / 600 for name in ("bea", "cid", "dan")]
    assert shares == pytest.approx([100 / 111, 10 / 111, 1 / 111], abs=0.04)  # b = 40 · 1 / 4 = 10


def test_the_site_asks_and_the_server_sends_just_that() -> None:
    here = site(BATCH, roster=FOUR)
    method = APPLE(budget=2)
    server = method.start(here.task, here.roster)
    assert [len(wants) for wants in server.wants.values()] == [2] * 4
    uplink, _ = method.train(here, method.remember(here), APPLE.Downlink({}), FIRST)
    assert len(uplink.wants) == 2
    assert "ada" not in uplink.wants
    merged = method.merge(server, {"ada": uplink}, FIRST)
    assert set(method.send(merged, here.card, at(1)).cores) == set(uplink.wants)
    odd = replace(uplink, wants=("ada", "cid", "nobody", "cid", "bea", "dan"))
    assert set(method.send(method.merge(server, {"ada": odd}, FIRST), here.card, at(1)).cores) == {"cid", "bea"}


def test_stale_copies_stay_in_the_mixture() -> None:
    """bea's 2 is kept while cid's core comes anew: w = (6 + 2 + 10)/3 before the step."""
    method, here = APPLE(relation_lr=0.0, budget=1), site(BATCH, roster=("ada", "bea", "cid"))
    memory = memory_of(method, here, ada=6.0, bea=2.0, cid=1.0)
    uplink, memory = step(method, here, memory, at(1), cid=10.0)
    assert uplink.loss == pytest.approx((18 / 3) ** 2 / 2)
    assert {name: value(core) for name, core in memory.cores.items() if name != "ada"} == {"bea": 2.0, "cid": 10.0}
    assert memory.seen == ("cid",)
    assert uplink.wants == ("bea",)


def test_the_core_of_a_site_that_is_away_stays() -> None:
    here = site(BATCH, roster=TWO)
    server = APPLE.Server(
        {"ada": line(1.0), "bea": line(2.0)}, {"ada": ("bea",), "bea": ("ada",)}, {"ada": 1, "bea": 1}
    )
    merged = APPLE().merge(server, {"ada": APPLE.Uplink(line(5.0), ("bea",), 0.0, 1)}, FIRST)
    assert {name: value(core) for name, core in merged.cores.items()} == {"ada": 5.0, "bea": 2.0}
    assert merged.wants == server.wants
    assert value(APPLE().send(merged, here.card, at(1)).cores["bea"]) == 2.0


@pytest.mark.parametrize("budget", [0, 1])
def test_a_round_downloads_as_many_models_as_it_may(budget: int, federation: Path, tmp_path: Path) -> None:
    """From the journal: nothing in the first round, then min(M, N − 1) models, and the header; one model up."""
    study = toy_study(federation, "apple", method__budget=budget, task__widths=[16, 32])
    result = run_in_process(study, tmp_path)
    model = sum(t.numel() * t.element_size() for t in study.task.shape().values())
    trains = [e for e in RunFolder.open(result.folder).events() if e["event"] == "train"]
    for event in trains:
        models = 0 if event["round"] == 1 else budget or 2
        assert event["bytes_down"] / model == pytest.approx(models, abs=0.05 * max(1, models)), event
        assert event["bytes_up"] / model == pytest.approx(1, abs=0.05)
    assert len(trains) == 9


# ---------------------------------------------------------------------------------------------- privacy


def test_no_message_but_memory_has_a_place_for_p() -> None:
    assert set(get_type_hints(APPLE.Uplink)) == {"core", "wants", "loss", "steps"}
    private = {"p", "history", "statistics"}
    for kind in (APPLE.Server, APPLE.Downlink, APPLE.Uplink, APPLE.Release):
        assert not private & set(get_type_hints(kind))
    assert private < set(get_type_hints(APPLE.Memory))


def test_what_leaves_in_every_round_is_one_core_and_four_facts(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "apple", method__budget=1)
    expected = {f"core/{name}": tuple(t.shape) for name, t in study.task.shape().items()}
    seen: list[tuple[str, int]] = []

    def hand(site: str, head: Envelope, reply: Reply) -> Reply:
        assert reply.packet is not None
        assert {name: tuple(t.shape) for name, t in reply.packet.tensors.items()} == expected
        shape = json.loads(json.loads(reply.packet.header)["message"])["tree"]
        assert set(shape) == {"core", "wants", "loss", "steps"}
        assert isinstance(shape["loss"], float)
        assert isinstance(shape["steps"], int)
        assert len(shape["wants"]) == 1
        assert shape["wants"][0] in {"ada", "bea", "cid"} - {site}
        seen.append((site, head.round.index))
        return reply

    run_tampered(study, tmp_path, hand)
    assert len(seen) == 9


def test_p_acts_on_what_leaves_through_training_alone() -> None:
    """A site without a batch to train on sends the same bytes whatever its p and the history of p."""
    method, here = APPLE(), replace(site(BATCH, roster=FOUR), data=Given(()))
    memory = method.remember(here)
    other = replace(
        memory, p={"ada": 3.0, "bea": -1.0, "cid": 0.5, "dan": 7.0}, history=torch.rand(5, 4), rounds=(0,) * 5
    )
    sent = [
        packet_files.to_bytes(flatten(method.train(here, kept, APPLE.Downlink({}), FIRST)[0]))
        for kept in (memory, other)
    ]
    assert sent[0] == sent[1]
    busy = site(BATCH, roster=FOUR)
    trained = [method.train(busy, kept, APPLE.Downlink({}), FIRST)[0] for kept in (memory, replace(memory, p=other.p))]
    assert value(trained[0].core) != value(trained[1].core)


@pytest.mark.parametrize("policy", ["average", "local-statistics"])
def test_running_statistics_are_the_personal_models_own_and_stay(policy: str, federation: Path, tmp_path: Path) -> None:
    study = toy_study(
        federation, "apple", task__norm="batch", local__batchnorm=policy, study__rounds=2, local__batch_size=2
    )
    parameters = {f"core/{name}" for name in study.task.parameters()}

    def hand(site: str, head: Envelope, reply: Reply) -> Reply:
        assert reply.packet is not None
        assert set(reply.packet.tensors) == parameters
        return reply

    folder = run_tampered(study, tmp_path, hand)
    kept = LocalNorm(frozenset(), "ada").kept(study.method)
    held: Any = MemoryStore(folder.path / "sites" / "ada" / "memory", "ada").at(1, kept)
    statistics: Weights = held.memory.statistics
    assert set(statistics) == set(study.task.shape()) - study.task.parameters()
    counts = [int(tensor) for name, tensor in statistics.items() if name.endswith("num_batches_tracked")]
    assert set(counts) == {2 * 4}  # two rounds of four batches: the mixture's own passes, and no other's
    assert study.method.deploy(study.task, held.memory, APPLE.Release("ada", {})).model == "personal"


# ---------------------------------------------------------------------------------------------- use and storage


def test_the_mixture_is_scored_and_outsiders_have_none() -> None:
    method, here = APPLE(), site(BATCH, roster=TWO)
    server = method.start(here.task, here.roster)
    memory = replace(memory_of(method, here, ada=4.0, bea=2.0), p={"ada": 1.5, "bea": -0.5})
    predictor = method.deploy(here.task, memory, method.release(server, here.card))
    assert (predictor.model, predictor.of, predictor.when) == ("personal", "ada", "trained")
    assert float(predictor.answer(BATCH.images).output) == 5.0
    fresh = method.deploy(here.task, None, method.release(server, here.card))
    assert fresh.when == "merged"
    start = sum(value(core) for core in server.cores.values()) / 2
    assert float(fresh.answer(BATCH.images).output) == pytest.approx(start)
    with pytest.raises(NotForOutsiders, match="--site"):
        method.deploy(here.task, None, method.release(server, None))


@pytest.fixture(scope="module")
def finished(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_in_process(toy_study(federation, "apple", study__rounds=4), tmp_path_factory.mktemp("apple")).folder


def test_a_run_predicts_with_a_sites_own_model_only(finished: Path) -> None:
    _, predictor = open_predictor(finished, "bea")
    assert (predictor.model, predictor.of) == ("personal", "bea")
    with pytest.raises(NotForOutsiders, match="--site"):
        open_predictor(finished)


def test_a_site_stores_every_core_once(finished: Path) -> None:
    """Two rounds are kept: N cores each, and the history of p; equal content is one file."""
    memories = finished / "sites" / "ada" / "memory"
    documents = [json.loads(path.read_text()) for path in sorted(memories.glob("*.json"))]
    cores = [{k: v for k, v in d["weights"].items() if "cores/" in k} for d in documents]
    assert all(len(found) == 3 for found in cores)
    used = {digest for d in documents for digest in (*d["weights"].values(), d["tensors"])}
    assert {path.stem for path in (memories / "store").glob("*")} == used
    model = max(path.stat().st_size for path in (memories / "store").glob("*"))
    total = sum(path.stat().st_size for path in (memories / "store").glob("*"))
    assert total < (len({digest for found in cores for digest in found.values()}) + 1) * model


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"budget": -1}, "from 0 up"),
        ({"mu": -1.0}, "from 0 up"),
        ({"relation_lr": float("nan")}, "from 0 up"),
        ({"scheduler": "linear"}, "cosine, exponential"),
        ({"core_init": "zero"}, "different, same"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(StudyError, match=words):
        APPLE(**fields)


def test_a_federation_that_cannot_work_is_refused_before_it_starts() -> None:
    here = site(BATCH, roster=TWO)
    with pytest.raises(StudyError, match="a site has 1 peers; give 1 to 1, or 0"):
        APPLE(budget=2).check(here.task, here.roster, here.local)
    with pytest.raises(StudyError, match="only one; use method 'local'"):
        APPLE().check(here.task, {"ada": here.card}, here.local)
    with pytest.raises(StudyError, match="mixes all parameters"):
        APPLE().check(here.task, here.roster, replace(here.local, batchnorm="local"))


def test_an_unusual_one_is_warned_of() -> None:
    here = site(BATCH, roster=TWO)
    cards = {"ada": SiteCard("ada", 0, 300, ("y",)), "bea": SiteCard("bea", 1, 20, ("y",))}
    (few,) = APPLE().check(here.task, cards, replace(here.local, batch_size=256))
    assert "site 'bea' has 20" in few
    (steep,) = APPLE(mu=1e4, relation_lr=1e-3).check(here.task, cards, here.local)
    assert "diverges" in steep
    assert APPLE().check(here.task, cards, here.local) == []


def test_a_site_with_fewer_cases_than_a_batch_makes_one_step(federation: Path, tmp_path: Path) -> None:
    result = run_in_process(toy_study(federation, "apple", local__batch_size=64, study__rounds=1), tmp_path)
    events = RunFolder.open(result.folder).events()
    assert [e["steps"] for e in events if e["event"] == "train"] == [1, 1, 1]
    (warning,) = [e["text"] for e in events if e["event"] == "warning"]
    assert "site 'ada' has 8, 'bea' has 12, 'cid' has 10" in warning
