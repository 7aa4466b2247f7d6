"""The ledger: ε by closed forms and by opacus's own accountants, one line per message, and a budget that holds."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.cli.main import main
from consilium.contract import Interrupted, crash_after, run_in_process
from consilium.hospital import Limits, too_little_privacy
from consilium.left_log import LOG, left
from consilium.local_training import Local
from consilium.methods import METHODS
from consilium.privacy.accounting import EXACT, Use, accountant_of, composed, epsilon, noise_for
from consilium.privacy.dp import Privacy
from consilium.privacy.ledger import TRAINING, as_json, entries_of, ledger, total, totals
from consilium.rehearsal import SiteRehearsal, put_rules
from consilium.run_folder import RunFolder
from consilium.simulation import go_on, resume
from consilium.site import Spent
from consilium.site_opening import place_in
from consilium.study import Study
from consilium.toy_federation import toy_study
from consilium.weights import Weights
from tests.toy import RESIDUAL


def private_study(federation: Path, method: str = "fedavg", **changes: Any) -> Study:
    quick = {"task__residual_units": int(method in RESIDUAL), "study__score_every": 3}
    return toy_study(federation, method, **{"privacy__unit": "patient", "privacy__clip": 0.5, **quick, **changes})


# ------------------------------------------------------------------------------------------- ε


def test_without_sampling_it_is_the_closed_form() -> None:
    """Two releases of noise 3 and one of noise 5 are one Gaussian mechanism of mean √(2/9 + 1/25)."""
    uses = [Use(3.0), Use(5.0), Use(3.0)]
    assert composed(uses, 1e-5) == epsilon(math.sqrt(2 / 9 + 1 / 25), 1e-5)
    assert accountant_of(uses) == EXACT
    assert composed([], 1e-5) == 0.0
    assert composed([*uses, Use(0.0)], 1e-5) == math.inf


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_sampling_is_counted_as_opacus_counts_it(accountant: str) -> None:
    """The same history, given to opacus's own accountant object step by step."""
    from opacus.accountants import create_accountant

    counter = create_accountant(accountant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for noise, rate, steps in ((1.5, 0.25, 40), (2.0, 0.125, 24), (8.0, 1.0, 1)):
            for _ in range(steps):
                counter.step(noise_multiplier=noise, sample_rate=rate)
        theirs = counter.get_epsilon(1e-5)
    ours = composed([Use(1.5, 0.25, 30), Use(8.0), Use(2.0, 0.125, 24), Use(1.5, 0.25, 10)], 1e-5, accountant)
    assert ours == pytest.approx(theirs, rel=0.01 if accountant == "rdp" else 1e-6)  # other orders are tried
    assert accountant_of([Use(1.5, 0.25)], accountant) == accountant


def test_the_tighter_accountant_is_below_the_other_and_above_the_truth() -> None:
    """At rate 1 the truth is the closed form: both bound it, prv closely. opacus, not our closed form, is asked."""
    from consilium.privacy.accounting import _by_prv, _by_rdp

    uses = (Use(3.0, 1.0, 10),)
    exact = composed(uses, 1e-5)
    assert exact <= _by_prv(uses, 1e-5) <= 1.02 * exact
    assert _by_prv(uses, 1e-5) < _by_rdp(uses, 1e-5) < 1.2 * exact


def test_the_noise_for_a_target_is_the_least_that_keeps_it() -> None:
    def uses(noise: float) -> list[Use]:
        return [Use(noise, 0.2, 100), Use(8.0)]

    noise = noise_for(4.0, 1e-5, uses)
    assert composed(uses(noise), 1e-5) <= 4.0 < composed(uses(0.995 * noise), 1e-5)
    plain = noise_for(2.0, 1e-5, lambda noise: [Use(noise)])
    assert composed([Use(plain)], 1e-5) == pytest.approx(2.0, rel=2e-3)


def test_a_site_with_more_patients_needs_less_noise() -> None:
    privacy = Privacy(clip=1.0, unit="patient", epsilon=4.0)
    small, large = (privacy.noise_at(cases, Local(), passes=20) for cases in (16, 160))
    assert small > 1.5 * large
    assert privacy.epsilon_at(16, Local(), 20) == pytest.approx(4.0, rel=0.01)
    assert privacy.noise_at(16, Local(), 20, statistics=1) > small  # they take their part of the same ε


# ------------------------------------------------------------------------------------------- the ledger of a run


def entries(run: Path, site: str) -> list[Any]:
    return ledger(left(place_in(run, site)))


def test_a_run_writes_what_every_site_spent(federation: Path, tmp_path: Path) -> None:
    """Interrupted after its second round and resumed: every message counts once, and ε is what the study promised."""
    study = private_study(
        federation, "fedsm", privacy__epsilon=3.0, method__selector_training="discriminant", method__confidence="tuned"
    )
    with pytest.raises(Interrupted):
        run_in_process(study, tmp_path, crash_after("train", 3))  # its answer has left, and is not merged
    (path,) = tmp_path.iterdir()
    done = resume(path, workers=0)
    found = entries(path, "ada")
    training = [entry for entry in found if entry.spent.of == TRAINING]
    assert [(entry.round, entry.spent.what, entry.spent.kind) for entry in training] == [
        (1, ("global", "personal"), "dp-sgd"),
        (2, ("global", "personal"), "dp-sgd"),
        (3, ("global", "personal"), "dp-sgd"),
        (4, ("features",), "gaussian"),
    ]
    rate, steps = 0.25, 4  # 8 cases in batches of 2
    assert {(entry.spent.rate, entry.spent.steps) for entry in training[:3]} == {(rate, steps)}
    noise = training[0].spent.noise
    assert total(found, 1e-5) == composed([Use(noise, rate, 3 * steps), Use(8.0)], 1e-5)
    assert 2.9 < total(found, 1e-5) <= 3.0
    told = totals(found, 1e-5)
    assert (told["accountant"], told["draws"]) == ("rdp", 13)
    assert told["unprotected"] == ["calibration", "numbers of cases", "routing", "scores", "steps"]
    assert done.summary["privacy"]["epsilon"] == pytest.approx(3.0, abs=0.05)
    assert done.summary["privacy"]["unit"] == "patient"


def test_what_every_kind_of_message_costs() -> None:
    """Tensors, weights, empty parts and numbers; a site's own noise covers what `spent` names."""

    @dataclass(frozen=True)
    class Uplink:
        global_: Weights | None
        mask: torch.Tensor
        steps: int
        nothing: tuple[float, ...] = ()

    @dataclass(frozen=True)
    class Several:
        encoders: dict[str, Weights]
        steps: int

    sent = Uplink(Weights({"w": torch.ones(3)}), torch.tensor([True, False]), 3)
    bare = entries_of(sent, "train", Privacy(), ())
    assert [(entry.what, entry.kind, entry.of) for entry in bare] == [
        (("global", "mask"), "none", "training"),
        (("steps",), "none", "counts"),
    ]
    noised = entries_of(sent, "train", Privacy(clip=1.0, noise=6.0), ())
    assert next((entry.what, entry.kind, entry.noise) for entry in noised) == (("global", "mask"), "gaussian", 3.0)
    own = Spent(("global",), "dp-sgd", 1.0, 0.5, 4)
    patient = Privacy(clip=1.0, noise=1.0, unit="patient")
    assert entries_of(sent, "train", patient, [own])[0] == own
    without = [entries_of(message, "train", patient, ())[0] for message in (sent, replace(sent, steps=0))]
    assert [(entry.kind, entry.of) for entry in without] == [("none", "training"), ("none", "validation")]
    inside = Several({"liver": Weights({"w": torch.ones(3)})}, 3)
    assert entries_of(inside, "train", patient, ())[0].of == "training"
    assert [entry.of for entry in entries_of(None, "score", Privacy(), ())] == ["validation"]
    assert entries_of(None, "deliver", Privacy(), ()) == ()


@pytest.fixture(scope="module")
def one_round(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one round, at noise 2."""
    study = private_study(federation, privacy__noise=2.0, privacy__delta=1e-4, study__rounds=1)
    return run_in_process(study, tmp_path_factory.mktemp("one")).folder


def test_passes_whose_messages_are_alike_all_count(federation: Path, tmp_path: Path) -> None:
    """Models that stay at their sites: three messages without a model are the same bits, and three passes were made."""
    study = private_study(federation, "local", privacy__epsilon=3.0, method__share_local_parts=False)
    found = entries(run_in_process(study, tmp_path).folder, "ada")
    assert [(e.round, e.spent.what) for e in found if e.spent.of == TRAINING] == [(n, ("local",)) for n in (1, 2, 3)]
    assert 2.9 < total(found, 1e-5) <= 3.0


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name, kind in METHODS.items() if not kind().not_private()])
def test_every_private_method_spends_what_the_study_promises(method: str, organs: Path, tmp_path: Path) -> None:
    """With models that stay at their sites where a method allows it, as between hospitals."""
    stays = {"method__share_local_parts": False} if hasattr(METHODS[method], "share_local_parts") else {}
    study = private_study(organs, method, privacy__epsilon=3.0, study__score_every=3, **stays)
    found = entries(run_in_process(study, tmp_path).folder, "(pooled)" if study.pooled else "cid")
    assert 2.8 < total(found, 1e-5) <= 3.0


def test_a_pass_from_another_start_counts_although_its_message_is_the_same() -> None:
    def line(drawn: str) -> dict[str, Any]:
        spent = Spent(("local",), "dp-sgd", 1.0, 0.5, 4, drawn=drawn)
        return {"run": "r", "what": "train", "round": 2, "sha256": "same", "spent": as_json([spent])}

    assert len(ledger([line("1f"), line("1f")])) == 1
    assert len(ledger([line("1f"), line("2e")])) == 2


def test_a_line_that_left_twice_counts_once_and_half_a_line_not_at_all(one_round: Path, tmp_path: Path) -> None:
    text = (place_in(one_round, "ada") / LOG).read_text()
    (tmp_path / LOG).write_text(text + text + text[: len(text) // 3])
    assert total(ledger(left(tmp_path)), 1e-5) == total(entries(one_round, "ada"), 1e-5) > 0


def test_a_site_stops_at_its_hospitals_budget(federation: Path, tmp_path: Path) -> None:
    """ε of one round is within the budget of ada's hospital.toml, ε of two is not: ada answers once, and says why."""
    study = private_study(federation, privacy__noise=2.0)
    one, two = (composed([Use(2.0, 0.25, 4 * rounds)], 1e-5) for rounds in (1, 2))
    rules = f'site = "ada"\ndata = "."\nmemory = "."\nlabels = ["blob"]\n[limits]\nepsilon = {(one + two) / 2}\n'
    folder = RunFolder.create(study, tmp_path)
    put_rules({"ada": SiteRehearsal(rules.encode())}, folder.path, folder.study)
    go_on(folder, workers=0)
    lost = [(event["site"], event["round"], event["why"]) for event in folder.events() if event["event"] == "lost"]
    assert lost == [("ada", number, "its privacy budget is used up") for number in (2, 3)]
    assert total(entries(folder.path, "ada"), 1e-5) == pytest.approx(one)
    why = (place_in(folder.path, "ada") / "errors.log").read_text()
    assert f"ε of all studies together would be {two:.3g}, and [limits] epsilon = " in why


def test_a_hospital_holds_a_target_against_its_limit(federation: Path) -> None:
    study = private_study(federation, privacy__epsilon=4.0)
    assert too_little_privacy(Limits(epsilon=4.0), study) == ""
    assert "demands ε of at most 2.0" in too_little_privacy(Limits(epsilon=2.0), study)
    assert "the study's is 4.0 at 1e-05" in too_little_privacy(Limits(epsilon=4.0, delta=1e-6), study)


def test_the_command_shows_a_ledger(one_round: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["ledger", str(one_round), "--delta", "1e-3"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert f"ada: ε {composed([Use(2.0, 0.25, 4)], 1e-3):.3g} at δ 0.001 (rdp, 4 draws)" in out
    assert "  global (training): DP-SGD, noise 2, 4 draws of rate 0.25, round 1" in out
    assert "  scores (validation): unprotected, " in out
    with pytest.raises(SystemExit):
        main(["ledger", str(one_round), "--json"])
    told = json.loads(capsys.readouterr().out)["ada"]
    assert told["delta"] == 1e-4  # the study's own
    (release,) = [one for one in told["releases"] if one["of"] == "training"]
    assert (release["what"], release["round"], release["kind"]) == (["global"], 1, "dp-sgd")
    with pytest.raises(SystemExit) as end:
        main(["ledger", str(tmp_path)])
    assert end.value.code == 2
    assert "holds no ledger" in capsys.readouterr().err
