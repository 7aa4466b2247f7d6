"""What leaves a site: every step by itself, and their order as a data-protection officer reads it."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import outgoing
from consilium.errors import DataError
from consilium.hospital import Limits
from consilium.hospital_policy import HospitalPolicy
from consilium.left_log import left
from consilium.local_norm import LocalNorm
from consilium.messages import AnswerHead, Request, ScoredModel, ScoreSheet, SiteFacts
from consilium.outgoing import STEPS, Outgoing, SiteRules
from consilium.policy import Permissive, Refused, read_key
from consilium.privacy.accounting import epsilon
from consilium.privacy.dp import NotFinite
from consilium.privacy.ledger import ledger, total
from consilium.score_sheets import WHOLE, Score, make_sheet
from consilium.site import Round
from consilium.study import Study
from consilium.tree import Packet, flatten
from consilium.weights import Weights
from tests.toy import toy_study

ROUND = Round(0, "train", 0, 3)
TRAIN = Request("train", "fedavg-s0-1", "fedavg", ROUND)
FACTS = SiteFacts(8, 0, ("blob",), 14, {"valid": 3, "test": 3}, "table", "arrays", "1", "2", "3")
NAME = "Müller#Hans#1950-01-01"


def sheet() -> ScoreSheet:
    model = ScoredModel("global", "", "merged")
    return make_sheet([Score(model, "valid", NAME, slice, "blob", "dice", 0.5) for slice in (WHOLE, 7)])


def hospital(folder: Path, **limits: Any) -> HospitalPolicy:
    return HospitalPolicy(Limits(**limits), ("blob",), b"k" * 32, folder)


def private(federation: Path, **changes: Any) -> Study:
    return toy_study(federation, privacy__clip=1.0, privacy__noise=1e-9, **changes)


def uplink(study: Study, value: float) -> Any:
    return study.method.Uplink(study.task.initial().map(lambda tensor: tensor * 0 + value), 0.5, 3)


def rules(study: Study, policy: Any = None, value: float = 0.0) -> SiteRules:
    order = flatten(study.method.Downlink(study.task.initial().map(lambda tensor: tensor * 0 + value)))
    norm = LocalNorm.of(study.task, study.local.batchnorm, "ada")
    return SiteRules(study, policy or Permissive(b"secret"), norm, order)


def test_the_order_of_the_steps() -> None:
    assert [step.__name__ for step in STEPS] == [
        "strip_what_must_not_leave",
        "hide_names",
        "pack",
        "keep_local_normalisation",
        "clip_and_add_noise",
        "round_for_transport",
        "refuse_what_is_not_finite",
        "log_and_let_go",
        "store_what_stays",
    ]
    assert all(step.__doc__ for step in STEPS)


def test_the_loss_is_taken_out_of_a_private_update(federation: Path) -> None:
    for study, loss in ((private(federation), 0.0), (toy_study(federation), 0.5)):
        out = outgoing.strip_what_must_not_leave(Outgoing(uplink(study, 1.0), AnswerHead()), rules(study), TRAIN)
        assert (out.content.loss, out.content.steps) == (loss, 3)


def test_an_alias_covers_the_whole_name(federation: Path, tmp_path: Path) -> None:
    """A '#' in a patient's name is no slice: that is a number of ours, beside the name."""
    site = SiteRules(toy_study(federation), hospital(tmp_path))
    out = outgoing.hide_names(Outgoing(sheet(), AnswerHead()), site, replace(TRAIN, do="score"))
    (alias,) = out.content.cases
    assert len(alias) == 16
    assert not any(part in alias for part in ("#", "Hans", "1950"))
    assert out.content.rows[:, 3].tolist() == [-1, 7]
    facts = outgoing.hide_names(Outgoing(FACTS, AnswerHead()), site, replace(TRAIN, do="card")).content
    assert "table" not in facts.table and "arrays" not in facts.arrays


def test_normalisation_stays_and_is_stored(federation: Path) -> None:
    study = toy_study(federation, task__norm="batch", local__batchnorm="local")
    kept: list[Weights | None] = []
    site = replace(rules(study, value=0.25), keep=kept.append)
    packed = outgoing.pack(Outgoing(uplink(study, 1.0), AnswerHead()), site, TRAIN)
    out = outgoing.store_what_stays(outgoing.keep_local_normalisation(packed, site, TRAIN), site, TRAIN)
    assert out.packet is not None
    assert site.norm is not None
    own = [path for path in out.packet.tensors if path.split("/")[-1] in site.norm.names]
    assert own
    for path, tensor in out.packet.tensors.items():
        if tensor.is_floating_point():
            assert set(tensor.unique().tolist()) == {0.25 if path in own else 1.0}
    assert kept[0] is not None
    assert {v for t in kept[0].values() if t.is_floating_point() for v in t.unique().tolist()} == {1.0}


def test_what_a_refused_update_would_leave_behind_is_not_stored(federation: Path, tmp_path: Path) -> None:
    """Else scores of a model that was trained beyond a budget could be asked for."""
    study = toy_study(federation)
    kept: list[Weights | None] = []
    for limits, stored in (({"message_bytes": 1}, 0), ({}, 1)):
        site = replace(rules(study, hospital(tmp_path, **limits)), keep=kept.append)
        with contextlib.nullcontext() if stored else pytest.raises(Refused):
            outgoing.leave(uplink(study, 1.0), AnswerHead(), site, TRAIN)
        assert len(kept) == stored


def test_an_update_is_clipped_to_what_the_study_says(federation: Path) -> None:
    study = private(federation)
    site = rules(study)
    packed = outgoing.pack(Outgoing(uplink(study, 5.0), AnswerHead()), site, TRAIN)
    out = outgoing.clip_and_add_noise(packed, site, TRAIN)
    assert out.packet is not None
    length = math.sqrt(
        sum(t.double().square().sum().item() for t in out.packet.tensors.values() if t.is_floating_point())
    )
    assert length == pytest.approx(1.0, rel=1e-3)


def test_without_noise_nothing_is_changed(federation: Path) -> None:
    """Not one bit, and not the loss."""
    study = toy_study(federation)
    sent = uplink(study, 5.0)
    out = outgoing.leave(sent, AnswerHead(), rules(study), TRAIN)
    assert out.packet is not None
    before = flatten(sent)
    assert out.packet.header == before.header
    assert all(torch.equal(out.packet.tensors[path], tensor) for path, tensor in before.tensors.items())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_order_that_is_not_finite_does_not_switch_clipping_off(value: float, federation: Path) -> None:
    """min(1, clip / NaN) is 1: one NaN, even in a buffer that nobody uses, would let the update out as it is."""
    study = private(federation)
    site = rules(study)
    assert site.order is not None
    path = max(path for path, tensor in site.order.tensors.items() if tensor.is_floating_point())
    broken = {**site.order.tensors, path: torch.full_like(site.order.tensors[path], value)}
    site = replace(site, order=Packet(site.order.header, broken))
    with pytest.raises(NotFinite):
        outgoing.leave(uplink(study, 5.0), AnswerHead(), site, TRAIN)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_update_that_is_not_finite_never_leaves(value: float, federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation)
    with pytest.raises(NotFinite, match="of the update holds values that are not finite"):
        outgoing.leave(uplink(study, value), AnswerHead(), rules(study, hospital(tmp_path)), TRAIN)
    assert list(left(tmp_path)) == []


# ------------------------------------------------------------------------------------------ limits and log


def send(policy: HospitalPolicy, study: Study, value: float, run: str = "run-s0-1", do: str = "train") -> None:
    request = replace(TRAIN, do=do, run=run)
    out = uplink(study, value) if do == "train" else replace(sheet(), values=torch.full((2,), value).double())
    outgoing.leave(out, AnswerHead(), rules(study, policy), request)


def test_budgets_are_of_all_studies_whatever_they_are_called(federation: Path, tmp_path: Path) -> None:
    """Another seed, name or setting is another run, and starts no new budget."""
    study = toy_study(federation)
    policy = hospital(tmp_path, rounds=3)
    for number, run in enumerate(("one-s0-1", "one-s1-2", "one-s0-1-2")):
        send(policy, study, number, run=run)
    with pytest.raises(Refused, match=r"\[limits\] rounds = 3, and this would be number 4") as refused:
        send(policy, study, 9.0, run="another-s7-2")
    assert refused.value.word == "rounds"
    send(policy, study, 1.0, run="one-s1-2")  # the same message again tells nothing new


@pytest.mark.parametrize(
    ("limits", "do", "key"),
    [
        ({"rounds": 2}, "train", "rounds"),
        ({"scorings": 2}, "score", "scorings"),
        ({"study_rounds": 2}, "train", "study_rounds"),
        ({"study_scorings": 2}, "score", "study_scorings"),
    ],
)
def test_a_used_up_budget_is_told_before_any_work(
    limits: dict[str, int], do: str, key: str, federation: Path, tmp_path: Path
) -> None:
    """A round that was answered before is carried out again: a resumed run repeats it to the last bit."""
    study, policy = toy_study(federation), hospital(tmp_path, **limits)
    request = replace(TRAIN, do=do, run="one-s0-1")
    for number in range(2):
        policy.before(request, study) if number else None
        send(policy, study, number, run="one-s0-1", do=do)
    policy.before(request, study)
    with pytest.raises(Refused, match=rf"\[limits\] {key} = 2, and so many have left"):
        policy.before(replace(request, round=Round(1, "train", 1, 3)), study)


@pytest.mark.parametrize(("limits", "do"), [({"study_rounds": 2}, "train"), ({"study_scorings": 2}, "score")])
def test_a_study_may_have_a_smaller_budget_of_its_own(
    limits: dict[str, int], do: str, federation: Path, tmp_path: Path
) -> None:
    """Its repetitions are the same study, another seed is not."""
    study, policy = toy_study(federation), hospital(tmp_path, rounds=4, scorings=4, **limits)
    for number, run in enumerate(("one-s0-1", "one-s0-1-2", "one-s1-1")):
        send(policy, study, number, run=run, do=do)
    with pytest.raises(Refused, match=r"\[limits\] study_"):
        send(policy, study, 8.0, run="one-s0-1-3", do=do)
    send(policy, study, 9.0, run="one-s1-1", do=do)
    with pytest.raises(Refused, match=r"\[limits\] (rounds|scorings) = 4"):
        send(policy, study, 10.0, run="two-s0-1", do=do)


@pytest.mark.parametrize(
    ("limits", "do", "word"),
    [
        ({"bytes": 30_000}, "train", "bytes"),
        ({"study_bytes": 30_000}, "train", "bytes"),
        ({"message_bytes": 1000}, "train", "bytes"),
        ({"rounds": 2}, "train", "rounds"),
        ({"scorings": 2}, "score", "scores"),
        ({"study_rounds": 2}, "train", "rounds"),
        ({"study_scorings": 2}, "score", "scores"),
    ],
)
def test_a_limit_is_counted_from_the_log(
    limits: dict[str, int], do: str, word: str, federation: Path, tmp_path: Path
) -> None:
    study = toy_study(federation)
    for number in range(9):
        with contextlib.suppress(Refused):
            send(hospital(tmp_path, **limits), study, 0.1 * number, do=do)  # a new process each time
    with pytest.raises(Refused) as refused:
        send(hospital(tmp_path, **limits), study, 0.95, do=do)
    assert refused.value.word == word
    total = sum(line["bytes"] for line in left(tmp_path))
    assert total <= limits.get("bytes", limits.get("study_bytes", math.inf))


def test_scorings_without_a_limit_are_those_of_the_study_twice(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, study__score_every=2)  # of 3 rounds, scored in the second, the last, and at the end
    assert study.scorings == 4
    for number in range(8):
        send(hospital(tmp_path), study, 0.1 * number, do="score")
    with pytest.raises(Refused):
        send(hospital(tmp_path), study, 0.95, do="score")
    assert len(list(left(tmp_path))) == 8


def test_epsilon_adds_up_over_studies(federation: Path, tmp_path: Path) -> None:
    """Two updates with noise 4 and one with noise 8 have μ² = 2 (2/4)² + (2/8)²."""
    lines = [{"what": "train", "run": "a", "sha256": str(i), "noise": n} for i, n in enumerate((4.0, 4.0, 8.0))]
    assert total(ledger(lines), 1e-5) == pytest.approx(epsilon(math.sqrt(2 * 0.25 + 0.0625), 1e-5))
    bare = {"what": "train", "run": "b", "sha256": "x", "noise": 0.0}
    assert total(ledger([*lines, bare]), 1e-5) == math.inf
    one = epsilon(2 / 20, 1e-5)
    policy = hospital(tmp_path, epsilon=1.5 * one)
    study = toy_study(federation, privacy__clip=1.0, privacy__noise=20.0)
    send(policy, study, 1.0, run="a-s0-1")
    send(policy, study, 2.0, run="b-s1-2")  # √2 times as much
    with pytest.raises(Refused, match="of all studies together"):
        send(policy, study, 3.0, run="c-s2-3")


def test_a_log_of_version_0_1_counts_too(federation: Path, tmp_path: Path) -> None:
    (tmp_path / "old-s0-1").mkdir()
    (tmp_path / "old-s0-1" / "left.jsonl").write_text('{"what": "train", "bytes": 9, "sha256": "a"}\n{"what": "tra')
    with pytest.raises(Refused):
        send(hospital(tmp_path, rounds=1), toy_study(federation), 1.0)


# ------------------------------------------------------------------------------------------ the key


def test_a_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "memory" / "key"
    key = read_key(path)
    assert len(key) == 32
    assert read_key(path) == key
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "ab", "zz" * 32, "ab" * 31, "ab" * 33])
def test_a_key_that_is_not_whole_is_refused_and_not_replaced(text: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(DataError, match="is not a whole key of 32 bytes: restore it"):
        read_key(path)
    assert path.read_text() == text
