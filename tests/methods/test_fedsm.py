"""FedSM: SoftPull, the selector's synchronised step, what is kept and what travels, by hand."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from consilium.batch import Batch
from consilium.data.cases import Cases
from consilium.errors import StudyError
from consilium.learning.fit import fit
from consilium.local_training import Local
from consilium.method import Best, OptimizerState, Valid
from consilium.methods.fedsm import FedSM
from consilium.methods.routing import Calibration
from consilium.methods.selector import selector_job
from consilium.methods.softpull import pulled
from consilium.run_folder import RunFolder
from consilium.simulation import run
from consilium.site import Round, SiteCard
from consilium.site_opening import open_worker
from consilium.weights import Weights, mean
from tests.learning.small import FIRST, batch, line, site, value
from tests.toy import SIZES, toy_study

ROSTER = {name: SiteCard(name, i, n, ("blob",)) for i, (name, (n, _, _)) in enumerate(SIZES.items())}
CALIBRATE = Round(3, "calibrate", 0, 1)


def models(*values: float) -> dict[str, Weights]:
    return {name: line(x) for name, x in zip(("ada", "bea", "cid"), values)}


def values(found: Mapping[str, Weights]) -> list[float]:
    return [value(found[name]) for name in sorted(found)]


# ------------------------------------------------------------------------------------------------ SoftPull


def test_soft_pull_by_hand() -> None:
    """λ = .7: .7·1 + .15·(2 + 6) = 1.9; .7·2 + .15·7 = 2.45; .7·6 + .15·3 = 4.65."""
    assert values(pulled(models(1, 2, 6), 0.7)) == pytest.approx([1.9, 2.45, 4.65])


@pytest.mark.parametrize(
    ("pull", "expected"),
    [(1.0, [1, 2, 6]), (1 / 3, [3, 3, 3]), (0.1, [0.1 + 0.45 * 8, 0.2 + 0.45 * 7, 0.6 + 0.45 * 3])],
)
def test_its_limits(pull: float, expected: list[float]) -> None:
    """λ = 1 is local training, λ = 1/K the uniform mean for all, below it the others weigh more."""
    assert values(pulled(models(1, 2, 6), pull)) == pytest.approx(expected)


class Spooled(Mapping[str, torch.Tensor]):
    """A reply in a file: every look is a new tensor, and it is known how many are alive."""

    def __init__(self, reads: list[str], alive: list[int], refs: list[weakref.ref[torch.Tensor]]) -> None:
        self.reads, self.alive, self.refs = reads, alive, refs

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = torch.ones(3)
        self.reads.append(name)
        self.refs.append(weakref.ref(tensor))
        self.alive.append(sum(ref() is not None for ref in self.refs))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter([f"tensor {i}" for i in range(8)])

    def __len__(self) -> int:
        return 8


def test_pulling_holds_one_tensor_of_every_site_beside_the_new_models() -> None:
    """Five models of eight tensors in files: each tensor is read once, and few are alive at any time."""
    reads: list[str] = []
    alive: list[int] = []
    refs: list[weakref.ref[torch.Tensor]] = []
    sites = {name: Weights.over(Spooled(reads, alive, refs)) for name in "abcde"}
    new = pulled(sites, 0.7)
    assert reads == [f"tensor {i}" for i in range(8) for _ in sites]
    assert max(alive) <= 2 * len(
        sites
    )  # of 40: those of one name, and those of the name before until they are replaced
    assert sum(ref() is not None for ref in refs) == 0
    assert len({new[site][name].data_ptr() for site in sites for name in new[site]}) == 40  # each new model once


@pytest.mark.parametrize("held", [0, 100, 10_000])
def test_large_models_are_pulled_when_they_are_read(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values, whether 0, 100 or all of 3 × 2 × 40 bytes are held; a counter stays its own site's."""
    draw = torch.Generator().manual_seed(0)
    sites = {
        name: Weights({**{key: torch.randn(10, generator=draw) for key in "vw"}, "seen": torch.tensor(i)})
        for i, name in enumerate("abc")
    }
    at_once = pulled(sites, 0.7)
    monkeypatch.setattr("consilium.methods.softpull.HELD", held)
    later = pulled(sites, 0.7)
    assert [model.computed for model in later.values()] == [held < 240] * 3
    assert all(torch.equal(later[name][key], at_once[name][key]) for name in "abc" for key in ("v", "w", "seen"))
    assert {name: model.digest for name, model in later.items()} == {n: m.digest for n, m in at_once.items()}


def test_a_run_whose_models_are_pulled_when_they_are_read_is_the_same(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in three rounds that are not scored; such a state is committed before the next orders."""
    study = toy_study(federation, "fedsm", study__rounds=3, study__score_every=3)
    at_once = run(study, tmp_path / "at once", workers=0).folder
    monkeypatch.setattr("consilium.methods.softpull.HELD", 0)
    later = run(study, tmp_path / "later", workers=0).folder
    for name in ("best.safetensors", "last.safetensors"):
        assert (later / name).read_bytes() == (at_once / name).read_bytes()


def test_a_case_is_read_and_augmented_once_for_three_models(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 training cases, two epochs, three models: 60 cases are made, not 180."""
    made: list[str] = []

    make = Cases._training_case

    def counted(self: Cases, place: Any, *how: int) -> Any:
        made.append(place.name)
        return make(self, place, *how)

    monkeypatch.setattr(Cases, "_training_case", counted)
    run(toy_study(federation, "fedsm", study__rounds=1, local__epochs=2, task__augment=["flip"]), tmp_path, workers=0)
    assert len(made) == 60
    assert {made.count(name) for name in made} == {2}


def test_others_count_alike_whatever_their_cases() -> None:
    replies = {name: uplink(personal=x) for name, x in zip(("ada", "bea"), (0.0, 10.0))}
    merged = FedSM(pull=0.5).merge(server(n={"ada": 1, "bea": 999}), replies, FIRST)
    assert values(merged.personal)[:2] == [5.0, 5.0]


def test_one_answer_keeps_its_model() -> None:
    assert values(pulled({"bea": line(2.0)}, 0.3)) == [2.0]


def test_counters_are_not_pulled() -> None:
    sites = {k: Weights({"w": torch.tensor(float(x)), "seen": torch.tensor(x)}) for k, x in (("ada", 3), ("bea", 5))}
    assert [w["seen"].item() for w in pulled(sites, 0.5).values()] == [3, 5]


# ------------------------------------------------------------------------------------------------ the server


def made(kind: Any, **given: Any) -> Any:
    """A message with these fields; the others, of modes not meant here, are None."""
    return kind(**{field.name: given.get(field.name) for field in dataclasses.fields(kind)})


def server(n: Mapping[str, int] | None = None, **changes: Any) -> FedSM.Server:
    start: dict[str, Any] = {
        "global_": line(0.0), "personal": models(10, 20, 30), "selector": line(2.0),
        "confidence": 0.0, "n": n or {"ada": 1, "bea": 2, "cid": 6},
    }  # fmt: skip
    merged: FedSM.Server = made(FedSM.Server, **{**start, **changes})
    return merged


def uplink(global_: float = 0.0, personal: float = 0.0, gradient: float = 0.0) -> FedSM.Uplink:
    sent: FedSM.Uplink = made(
        FedSM.Uplink, global_=line(global_), personal=line(personal), selector=line(gradient), loss=0.0, steps=1,
    )  # fmt: skip
    return sent


def counted(scores: tuple[float, ...], cases: int) -> FedSM.Uplink:
    """A reply of the calibrate phase."""
    gains = tuple(score - scores[-1] for score in scores)
    squares = tuple(gain**2 / max(1, cases) for gain in gains)  # every case gains alike: no doubt
    found = Calibration(cases, scores, cases, gains, squares)
    sent: FedSM.Uplink = made(FedSM.Uplink, calibration=found, loss=0.0, steps=0)
    return sent


def test_the_merge_by_hand() -> None:
    """w_g by cases: (1·9 + 2·0 + 6·3)/9 = 3. w_s: the mean gradient (9 + 0 − 18)/9 = −1, Adam steps up by η_s."""
    replies = {"ada": uplink(9, 1, 9), "bea": uplink(0, 2, 0), "cid": uplink(3, 6, -3)}
    merged = FedSM(pull=0.7, selector_training="synchronised", selector_lr=0.1).merge(server(), replies, FIRST)
    assert value(merged.global_) == pytest.approx(3.0)
    assert values(merged.personal) == pytest.approx([1.9, 2.45, 4.65])
    assert value(merged.selector) == pytest.approx(2.1)
    assert merged.selector_state is not None and merged.selector_state.step == 1
    assert merged.confidence == 0.0


def test_absent_sites_keep_their_personal_model_and_do_not_pull() -> None:
    merged = FedSM(pull=0.7).merge(server(), {"ada": uplink(0, 1), "bea": uplink(0, 2)}, FIRST)
    assert values(merged.personal) == pytest.approx([0.7 * 1 + 0.3 * 2, 0.7 * 2 + 0.3 * 1, 30.0])


def test_one_site_alone_is_merged_too() -> None:
    merged = FedSM(pull=0.7).merge(server(), {"bea": uplink(5, 7, 1)}, FIRST)
    assert value(merged.global_) == 5.0
    assert values(merged.personal) == [10.0, 7.0, 30.0]


def test_the_selector_step_is_adam_on_the_averaged_gradient() -> None:
    """Three rounds against torch.optim.Adam, bit by bit; moments stay at the server."""
    parameter = nn.Parameter(torch.tensor([[2.0]]))
    adam = torch.optim.Adam([parameter], 0.05)
    state = server()
    for gradients in ((9.0, 0.0, -3.0), (1.0, 1.0, 1.0), (-2.0, 5.0, 0.5)):
        replies = {name: uplink(gradient=g) for name, g in zip(("ada", "bea", "cid"), gradients)}
        parameter.grad = mean({name: r.selector for name, r in replies.items()}, state.n)["weight"].clone()  # type: ignore[misc]
        adam.step()
        state = FedSM(selector_training="synchronised", selector_lr=0.05).merge(state, replies, FIRST)
    assert state.selector["weight"].equal(parameter.detach())


def test_the_averaged_gradient_is_that_of_all_cases_together(federation: Path, tmp_path: Path) -> None:
    """Sites that each hold one class, together: the cross-entropy over all 30 cases, to 1e-6."""
    study = toy_study(federation, "fedsm", local__batch_size=5)
    sites = {name: open_worker(study, study.federation(), name, ROSTER, tmp_path).site for name in ROSTER}
    start = study.task.initial("selector", labels=list(ROSTER))
    gradients = {
        name: fit(here, {"selector": selector_job(start, here, "synchronised", 1e-3)}, FIRST)["selector"].gradient
        for name, here in sites.items()
    }
    together = mean(gradients, {name: card.n for name, card in ROSTER.items()})  # type: ignore[arg-type]
    network = study.task.network("selector", list(ROSTER))
    network.load_state_dict(dict(start))
    parts = [next(iter(here.data.whole("train", 100))).images for here in sites.values()]
    truth = torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)])
    nn.functional.cross_entropy(network(torch.cat(parts)), truth).backward()  # type: ignore[no-untyped-call]
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, atol=1e-6, rtol=1e-5)


def test_the_selectors_right_answer_is_the_site_itself() -> None:
    """Class order is site-name order: for bea the target is 1, whatever the images are."""
    here = site(batch([1.0, 2.0], [0.0, 0.0]), name="bea", roster=["ada", "bea", "cid"])
    job = selector_job(Weights({"weight": torch.zeros(3, 1)}), here, "synchronised", 1e-3)
    assert (job.kind, job.labels, job.step) == ("selector", ["ada", "bea", "cid"], False)
    assert job.loss is not None
    output = torch.tensor([[0.0, 5.0, 0.0], [9.0, 0.0, 0.0]])
    by_hand = nn.functional.cross_entropy(output, torch.tensor([1, 1]))
    assert job.loss(output, Batch(torch.zeros(2, 1), torch.zeros(2), ("a", "b"))).item() == by_hand.item()


# ------------------------------------------------------------------------------------------------ a round


def test_all_three_start_from_the_same_weights(federation: Path) -> None:
    study = toy_study(federation, "fedsm", method__selector_training="synchronised")
    start = study.method.start(study.task, ROSTER)
    assert {w.digest for w in start.personal.values()} == {start.global_.digest}
    assert list(start.personal) == list(ROSTER) == ["ada", "bea", "cid"]
    assert start.selector["8.weight"].shape[0] == 3  # one output per site


def test_a_site_gets_its_own_personal_model_only() -> None:
    order = FedSM(selector_training="synchronised").send(server(), ROSTER["bea"], FIRST)
    assert (value(order.global_), value(order.personal), value(order.selector), order.trial) == (0.0, 20.0, 2.0, None)
    assert FedSM(selector_training="discriminant").send(server(), ROSTER["bea"], FIRST).selector is None


@pytest.mark.parametrize(("state", "steps"), [("kept", 2), ("fresh", 0)])
def test_optimiser_states_stay_at_the_site_if_kept(state: str, steps: int) -> None:
    here = site(batch([1.0], [0.0]), roster=["ada", "bea"], optimizer="adam", optimizer_state=state)
    method = FedSM()
    selector = Weights({"weight": torch.zeros(2, 1)})
    order = made(FedSM.Downlink, global_=line(1.0), personal=line(2.0), selector=selector)
    sent, memory = method.train(here, method.remember(here), order, FIRST)
    assert sorted(memory.states) == (["global", "personal"] if steps else [])
    assert (value(sent.global_), value(sent.personal)) == (pytest.approx(0.9), pytest.approx(1.9))
    _, memory = method.train(here, memory, order, FIRST)
    assert {name: kept.step for name, kept in memory.states.items()} == (
        {"global": steps, "personal": steps} if steps else {}
    )


def test_two_models_and_a_selector_travel(federation: Path, tmp_path: Path) -> None:
    """2|w_g| + |w_s| each way, within 2 %: no optimiser moments, no other site's model."""
    study = toy_study(
        federation, "fedsm", study__rounds=1, method__confidence=0.5, local__batch_size=12,
        method__selector_training="synchronised",
        task__widths=[32, 64, 128], task__selector_widths=[32, 64, 128],
    )  # fmt: skip
    result = run(study, tmp_path, workers=0)
    model, selector = study.task.shape(), study.task.shape("selector", labels=list(ROSTER))
    expected = 4 * (2 * model.numel() + selector.numel())
    for event in RunFolder.open(result.folder).events():
        if event["event"] == "train":
            assert event["bytes_up"] == pytest.approx(expected, rel=0.02)
            assert event["bytes_down"] == pytest.approx(expected, rel=0.02)


# ------------------------------------------------------------------------------------------------ what it refuses


def test_one_site_is_refused() -> None:
    with pytest.raises(StudyError, match="at least two sites; with one, use 'local'"):
        FedSM().check(None, {"ada": ROSTER["ada"]}, None)  # type: ignore[arg-type]


def test_a_pull_below_one_over_k_is_warned_of() -> None:
    networks = {"selector_training": "synchronised"}
    (warning,) = FedSM(pull=0.3, **networks).check(None, ROSTER, Local())  # type: ignore[arg-type]
    assert "pull = 0.3 is below 1/K = 0.333" in warning
    assert FedSM(pull=1 / 3, **networks).check(None, ROSTER, Local()) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("pull", [0.0, -0.1, 1.01, float("nan")])
def test_a_pull_out_of_range_is_refused(pull: float) -> None:
    with pytest.raises(StudyError, match=r"λ must be in \(0, 1\]"):
        FedSM(pull=pull)


# ------------------------------------------------------------------------------------------------ the best of each


def scored(global_: float, routed: float, ada: float, bea: float, number: int) -> dict[str, Valid]:
    marks = {"global:pooled": global_, "super:routed": routed, "personal/ada": ada, "personal/bea": bea, "super": ada}
    return {key: Valid(mark, number) for key, mark in marks.items()}


def state_of(x: float) -> FedSM.Server:
    moments = OptimizerState(int(x), {})
    personal = {"ada": line(x), "bea": line(x)}
    return server(global_=line(x), personal=personal, selector=line(x), selector_state=moments)


def test_each_model_keeps_its_own_best_round() -> None:
    """Round 2 is better for w_g and bea, worse for ada, and routes as well: a tie goes to the later selector."""
    first = Best(state_of(1), scored(0.5, 1.0, 0.8, 0.4, 1))
    second = Best(state_of(2), scored(0.6, 1.0, 0.7, 0.5, 2))
    kept = FedSM().keep(first, second)
    assert (value(kept.server.global_), value(kept.server.selector)) == (2.0, 2.0)
    assert values(kept.server.personal) == [1.0, 2.0]
    assert kept.server.selector_state.step == 2
    assert {key: (mark.value, mark.round) for key, mark in kept.valid.items()} == {
        "global:pooled": (0.6, 2), "super:routed": (1.0, 2), "personal/ada": (0.8, 1), "personal/bea": (0.5, 2),
    }  # fmt: skip


def test_a_tie_of_a_model_stays_with_the_earlier_round() -> None:
    kept = FedSM().keep(
        Best(state_of(1), scored(0.5, 0.9, 0.8, 0.4, 1)), Best(state_of(2), scored(0.5, 0.8, 0.8, 0.4, 2))
    )
    assert (value(kept.server.global_), value(kept.server.selector)) == (1.0, 1.0)
    assert values(kept.server.personal) == [1.0, 1.0]


def test_a_site_without_validation_keeps_its_first() -> None:
    second = {key: mark for key, mark in scored(0.9, 1.0, 0.9, 0.9, 2).items() if key != "personal/bea"}
    kept = FedSM().keep(Best(state_of(1), scored(0.5, 0.9, 0.8, 0.4, 1)), Best(state_of(2), second))
    assert values(kept.server.personal) == [2.0, 1.0]


def test_jointly_the_super_model_decides() -> None:
    first, second = Best(state_of(1), scored(0.5, 1.0, 0.8, 0.4, 1)), Best(state_of(2), scored(0.6, 1.0, 0.7, 0.5, 2))
    assert FedSM(best="joint").keep(first, second) is first


# ------------------------------------------------------------------------------------------------ calibration


def test_calibration_comes_last_and_only_if_tuned() -> None:
    networks: Any = {"selector_training": "synchronised"}
    assert [phase.name for phase in FedSM(confidence=0.9, **networks).phases(5)] == ["train"]
    train, calibrate = FedSM(**networks).phases(5)
    assert (train.rounds, calibrate.rounds, calibrate.counts, calibrate.from_best) == (5, 1, False, True)
    assert FedSM(confidence=0.9).start(toy_task(), ROSTER).confidence == 0.9


def toy_task() -> Any:
    from tests.learning.small import Line

    return Line()


def test_in_calibration_sums_come_back_and_nothing_else() -> None:
    order = FedSM().send(server(), ROSTER["ada"], CALIBRATE)
    assert (order.global_, order.personal, order.selector) == (None, None, None)
    assert order.trial is not None and order.trial.home == "ada"
    tallies = {"ada": (3.0,) * 12 + (4.0,), "bea": (1.0,) * 13}  # γ = 1 is best
    replies = {name: counted(t, 5) for name, t in tallies.items()}
    merged = FedSM().merge(server(), replies, CALIBRATE)
    assert merged.confidence == 1.0
    assert value(merged.global_) == 0.0  # nothing else changed


def test_the_study_says_whose_mean_chooses_gamma() -> None:
    """γ = 0: 9 of 10 and .2 of 1, pooled 9.2, over sites .55. γ = .9: 6 and 1, pooled 7, over sites .8."""
    tallies = {
        "ada": ((9.0, *(0.0,) * 5, 6.0, *(0.0,) * 5, 3.0), 10),
        "bea": ((0.2, *(0.0,) * 5, 1.0, *(0.0,) * 5, 0.1), 1),
    }
    replies = {name: counted(*tally) for name, tally in tallies.items()}
    chosen = {by: FedSM(tuned_by=by).merge(server(), replies, CALIBRATE).confidence for by in ("sites", "pooled")}
    assert chosen == {"sites": 0.9, "pooled": 0.0}
    with pytest.raises(StudyError, match="tuned_by = 'cases': it must be one of sites, pooled"):
        FedSM(tuned_by="cases")


def test_without_validation_cases_gamma_stays() -> None:
    replies = {"ada": counted((0.0,) * 13, 0)}
    assert FedSM().merge(server(confidence=0.4), replies, CALIBRATE).confidence == 0.4
