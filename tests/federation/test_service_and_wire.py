"""The wire and the hospital's service without a network between them: what is refused, left out and written down."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.fuel.utils.buffer_list import ConsumableBufferList
from PIL import Image
from safetensors.torch import load_file

from consilium import engine, packet_files, simulation, tree
from consilium.cli.main import main
from consilium.errors import StudyError, WorkError
from consilium.export.exporting import export_delivered
from consilium.federation.admin import for_federation
from consilium.federation.cleaning import of_hospital
from consilium.federation.forecasting import Exchange, Forecast, forecast_study
from consilium.federation.hospital_site import ClosedSite, HospitalSite
from consilium.fields import plain
from consilium.hospital import Hospital, Keep, Limits, read_hospital
from consilium.hospital_policy import HospitalPolicy
from consilium.left_lines import log_failure
from consilium.left_log import LOG
from consilium.left_log import left as log_of
from consilium.messages import AnswerHead, Envelope, Request
from consilium.methods import METHODS
from consilium.methods.apple import split_parameters
from consilium.policy import Refused
from consilium.prediction import open_at_hospital, trained_on_at_hospital
from consilium.run_folder import RunFolder
from consilium.site import Round
from consilium.study import Study
from consilium.study_reading import make_study
from consilium.wires.flare import Body, FlareAnswer, FlareWire, OrderHead, RestartJob, read_answer
from tests.federation.lies import ANSWERS, CARDS, SHEETS, edited, of_sheet
from tests.toy import SIZES, toy_study

Change = Callable[[str, Request, FlareAnswer], FlareAnswer]


class Direct:
    """A line that calls the hospitals; `change` is what happens to an answer on its way."""

    def __init__(self, study: Study, hospitals: Mapping[str, Hospital], change: Change | None = None) -> None:
        self.sites = {name: HospitalSite(hospital, name, study.to_toml()) for name, hospital in hospitals.items()}
        self.change: Change = change or (lambda site, request, answer: answer)
        self.words = lambda site, request, text: text  # what happens to the head of an answer
        self.lock = threading.Lock()  # real sites are processes; here they share the networks kept at hand
        self.returned: set[str] = set()
        self.absent: set[str] = set()

    def ask(self, site: str, request: Request, body: Body, seconds: float, room: int) -> FlareAnswer:
        with self.lock:
            asked = self.sites[site].read(tree.to_text(OrderHead("0" * 32, seconds, request)))
            assert asked is not None
            answer = self.sites[site].answer(asked.request, body)
            text = self.words(site, request, tree.to_text(answer.head))
            return self.change(site, request, read_answer(text, answer.body))

    def here(self) -> set[str]:
        return set(self.sites) - self.absent

    def back(self) -> set[str]:
        return self.returned

    def give_up(self, site: str) -> None:
        pass

    def heard(self) -> set[str]:
        return set()

    def dropped(self) -> list[tuple[str, str]]:
        return []

    def stopped(self) -> bool:
        return False


@pytest.fixture
def hospitals(federation: Path, tmp_path: Path) -> dict[str, Hospital]:
    return {
        name: Hospital(name, str(federation / name), str(tmp_path / "hospitals" / name), ("blob",), "cpu")
        for name in SIZES
    }


def deploy(study: Study, hospitals: Mapping[str, Hospital], to: Path, change: Change | None = None) -> RunFolder:
    study = for_federation(study, tuple(SIZES))
    folder = RunFolder.create(study, to)
    engine.run(study, FlareWire(study, folder, Direct(study, hospitals, change)), folder)
    return folder


def index_of(request: Request) -> int:
    return request.round.index if request.round else -1


def events(folder: RunFolder, *kinds: str) -> list[Mapping[str, Any]]:
    return [event for event in folder.events() if event["event"] in kinds]


# ------------------------------------------------------------------------------------ the same bits, offline use


def test_a_hospital_predicts_offline_with_the_part_that_never_left(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = toy_study(federation, "apfl")
    folder = deploy(study, hospitals, tmp_path / "server")
    simulated = simulation.run(study, tmp_path / "simulated", workers=0).folder
    assert (folder.path / "last.safetensors").read_bytes() == (simulated / "last.safetensors").read_bytes()
    away = replace(hospitals["bea"], data="nowhere")  # neither data nor server are needed
    _, predictor = open_at_hospital(away)
    assert (predictor.model, predictor.of) == ("personal", "bea")
    from consilium.prediction import open_predictor

    _, expected = open_predictor(simulated, "bea")
    images = torch.rand((2, 1, 16, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(predictor.answer(images).output, expected.answer(images).output)
    trained = trained_on_at_hospital(away)  # delivered with the model: images unlike it are named here too
    assert trained == folder.origin.trained_on()
    assert trained is not None
    Image.fromarray(np.full((64, 64), 7, np.uint8)).save(tmp_path / "odd.png")
    settings = tmp_path / "bea.toml"
    settings.write_text(f'site = "bea"\ndata = "nowhere"\nmemory = {away.memory!r}\nlabels = ["blob"]\n')
    with pytest.raises(SystemExit):
        main(["predict", "--hospital", str(settings), str(tmp_path / "odd.png"), "--to", str(tmp_path / "out")])
    assert "warning: unlike the training images: " in capsys.readouterr().err


def test_a_hospital_exports_the_model_that_never_left(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    deploy(toy_study(federation, "apple"), hospitals, tmp_path / "server")
    study, predictor = open_at_hospital(replace(hospitals["bea"], data="nowhere"))
    done = export_delivered(study, predictor, tmp_path / "model", check=False)
    assert done.models == ("personal_bea",)
    kept = load_file(tmp_path / "model" / "personal_bea" / "models" / "model.safetensors")
    own: Any = predictor
    assert sorted(t.sum().item() for t in kept.values()) == sorted(t.sum().item() for t in own.weights.values())


def test_a_release_that_is_used_is_not_cleaned_away(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    deploy(toy_study(federation, study__rounds=1), hospitals, tmp_path / "server")
    bea = replace(hospitals["bea"], keep=Keep(releases=30))
    (place,) = {path.parent for path in Path(bea.memory).glob("*/release.json")}
    for path in [*place.rglob("*"), place]:
        os.utime(path, (time.time() - 40 * 86_400,) * 2)
    assert [(item.kind, round(item.days)) for item in of_hospital(bea, None)] == [("release", 40)]
    open_at_hospital(bea)
    assert of_hospital(bea, None) == []


def test_no_case_name_leaves(hospitals: dict[str, Hospital], federation: Path, tmp_path: Path) -> None:
    said: list[bytes] = []

    def listen(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        said.extend((answer.body, tree.to_text(answer.head).encode()))
        return answer

    folder = deploy(toy_study(federation), hospitals, tmp_path / "server", listen)
    heard = b"".join(said)
    names = [path.stem.encode() for path in federation.glob("*/images/*.png")]
    assert not [name for name in names if name in heard]
    assert str(federation).encode() not in heard
    cases = {row.case for row in folder.rows() if row.case}
    assert len(cases) == 3 * (3 + 3)  # told apart nevertheless


def test_everything_that_left_is_written_down(hospitals: dict[str, Hospital], federation: Path, tmp_path: Path) -> None:
    folder = deploy(toy_study(federation), hospitals, tmp_path / "server")
    left = [line for line in log_of(Path(hospitals["ada"].memory)) if line["run"] == folder.path.name]
    sent = [line["bytes"] for line in left if line["what"] == "train"]
    assert [line["what"] for line in left].count("train") == 3
    assert min(sent) >= min(event["bytes_up"] for event in events(folder, "train"))
    assert all(len(line["sha256"]) == 64 for line in left)


# ------------------------------------------------------------------------------------ how much is sent


def test_nothing_of_a_hospital_can_be_read_by_others(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    """Whatever the umask: memory, release, key, order, study and the log of what left."""
    before = os.umask(0)
    try:
        deploy(toy_study(federation, "apfl", study__rounds=1), hospitals, tmp_path / "runs")
        Path(hospitals["bea"].memory).joinpath("errors.log").unlink(missing_ok=True)
        other = HospitalSite(hospitals["bea"], "bea", "not a study")
        assert other.answer(Request("card", "other"), b"").head.error == "study"
    finally:
        os.umask(before)
    place = Path(hospitals["bea"].memory)
    found = {str(path.relative_to(place)): path for path in (place, *place.rglob("*"))}
    wrong = {name: oct(path.stat().st_mode & 0o777) for name, path in found.items() if path.stat().st_mode & 0o077}
    assert wrong == {}
    names = {path.name for path in found.values()}
    expected = {"key", "errors.log", "left.jsonl", "order.safetensors", "release.safetensors", "study.toml", "memory"}
    assert expected <= names


def test_a_core_nobody_updated_is_not_sent_again(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    study = toy_study(federation, "apple", study__rounds=5, study__score_every=5, study__away={"cid": [2, 3]})
    folder = deploy(study, hospitals, tmp_path / "server")
    own = {e["round"]: e["bytes_down"] for e in events(folder, "train") if e["site"] == "ada"}
    core = sum(t.numel() * t.element_size() for t in split_parameters(study.task, study.task.shape())[0].values())
    assert own[1] < core  # the first cores come from the seed
    assert own[2] > 2 * core
    assert own[3] == own[4] == own[2] - core  # bea's; cid's is the one of round 2
    assert own[5] == own[2]
    simulated = simulation.run(study, tmp_path / "simulated", workers=0).folder
    assert (folder.path / "last.safetensors").read_bytes() == (simulated / "last.safetensors").read_bytes()


def test_a_site_that_lost_what_it_held_is_sent_all_of_it(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    study = toy_study(federation, "apple", study__rounds=6, study__score_every=6, study__away={"cid": [2, 3, 4, 5]})
    line: list[Direct] = []

    def forgets(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        if site == "ada" and request.do == "train" and index_of(request) == 2:
            line[0].sites["ada"]._held.clear()
        return answer

    travelling = for_federation(study, tuple(SIZES))
    folder = RunFolder.create(travelling, tmp_path / "server")
    line.append(Direct(travelling, hospitals, forgets))
    engine.run(travelling, FlareWire(travelling, folder, line[0]), folder)
    (lost,) = events(folder, "lost")
    assert (lost["site"], lost["round"], lost["why"]) == ("ada", 4, "the message was damaged on its way")
    own = {e["round"]: e["bytes_down"] for e in events(folder, "train") if e["site"] == "ada"}
    assert own[5] > 1.5 * own[3]


FORESEEN: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("fedavg", "fedsm", "apple", "fedavg-pl", "local")},
    "fedsm-extra": {"study__rounds": 9, "study__score_every": 9},  # several selector rounds, models sent in the first
    "ufps": {"method__sharpness__start": 0.4, "method__uncertainty__trust_from": 0.4},
}


def test_a_forecast_without_data_asks_how_many_sites() -> None:
    facts = {"task": "segmentation", "labels": ["disc"], "dimensions": 2, "channels": 3}
    study = make_study({"facts": facts, "method": {"name": "fedavg"}})
    with pytest.raises(StudyError, match="--sites"):
        forecast_study(study)
    assert forecast_study(study, 3).sites == 3


def test_an_administrator_without_data_forecasts_for_the_sites_of_its_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's command: the study names a folder of data that is not here, and has its facts."""
    from typer.testing import CliRunner

    from consilium.cli.main import app

    (tmp_path / "kits/admin").mkdir(parents=True)
    (tmp_path / "kits/admin/consilium.json").write_text('{"name": "admin", "sites": ["ada", "bea", "cid", "dan"]}')
    (tmp_path / "study.toml").write_text(
        '[data]\nfederation = "data/retina"\n[method]\nname = "fedsm"\n[study]\nrounds = 2\n'
        '[facts]\ntask = "segmentation"\nlabels = ["disc"]\ndimensions = 2\nchannels = 3\n'
    )
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["federation", "forecast", "study.toml", "--mbit", "100"])
    assert done.exit_code == 0, done.output
    assert "the server carries 4 times as much" in done.output


@pytest.mark.parametrize("method", ["fedsm", "fedsm-extra"])
def test_a_forecast_makes_no_personal_models(federation: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 200 sites are 25 GB with the paper's network: they are counted by their shapes, never computed."""
    study = toy_study(federation, method, study__rounds=10)
    before = forecast_study(study)
    monkeypatch.setattr("consilium.methods.softpull.HELD", 0)
    monkeypatch.setattr("consilium.weights.Computed.__getitem__", lambda self, name: pytest.fail(f"{name} was read"))
    assert forecast_study(study) == before


def test_a_forecast_of_200_sites_has_units_that_a_person_reads() -> None:
    """150 rounds of 1 GB in 160 s at 50 Mbit/s: 24,000 s; 200 sites write 200 GB."""
    rounds = (Exchange("train", True, 500_000_000, 500_000_000, 200_000_000_000),) * 150
    lines = list(Forecast(rounds, 0, 0, 200, 2_900_000_000).lines(50))
    assert lines[0] == "train: 150 rounds, per round and site 500.0 MB down, 500.0 MB up; 160.0 s at 50 Mbit/s"
    assert "at most 200.0 GB of messages" in lines[2] and "its state is 2.9 GB" in lines[2]
    assert lines[-1].startswith("in all, per site: 75.0 GB down, 75.0 GB up, 6.7 h at 50 Mbit/s; the server carries")


def test_a_forecast_says_alike_rounds_once(federation: Path) -> None:
    """Round 10 has a digit more than round 9 in its header."""
    lines = list(forecast_study(toy_study(federation, study__rounds=12)).lines(100))
    assert [line.split(",")[0] for line in lines if "round" in line.split(",")[0]] == ["train: 12 rounds"]


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=[pytest.mark.slow] if m in ("fedsm-extra", "fedavg-pl", "fedsm") else []) for m in FORESEEN],
)
def test_the_forecast_is_what_the_journal_counts(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path, method: str
) -> None:
    study = for_federation(toy_study(federation, method, local__batch_size=4, **FORESEEN[method]), tuple(SIZES))
    folder = deploy(study, hospitals, tmp_path / "server")
    foreseen = forecast_study(study)
    for site in SIZES:
        own = [event for event in events(folder, "train") if event["site"] == site]
        assert sum(event["bytes_down"] for event in own) == pytest.approx(foreseen.down, rel=0.05)
        assert sum(event["bytes_up"] for event in own) == pytest.approx(foreseen.up, rel=0.05)


@pytest.mark.parametrize("method", [name for name, kind in METHODS.items() if kind.deployable and not kind.pooled])
def test_everything_that_can_be_deployed_can_be_foreseen(federation: Path, method: str) -> None:
    study = toy_study(federation, method, study__rounds=10)
    assert sum(exchange.up for exchange in forecast_study(study).exchanges) > 0


# ------------------------------------------------------------------------------------ answers that cannot be used


def test_answers_that_cannot_be_used_are_left_out_and_journalled(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    """One round for each way in which an answer can be wrong, then a good one."""

    def change(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        if site != "bea" or request.do != "train":
            return answer
        lie = lies[index_of(request)] if index_of(request) < len(lies) else None
        return replace(answer, body=lie.body(bytes(answer.body))) if lie and lie.body else answer

    few = ("values that are no numbers", "another shape", "half of it", "2 MB too much", "no packet")
    lies = [ANSWERS[name] for name in few]  # all of them: test_hostile_messages.py
    rounds = len(lies) + 1
    study = toy_study(federation, study__rounds=rounds, study__score_every=rounds)
    folder = deploy(study, hospitals, tmp_path / "server", change)
    said = events(folder, "lost", "refused")
    assert [(event["site"], event["round"]) for event in said] == [("bea", i + 1) for i in range(len(lies))]
    for event, lie in zip(said, lies, strict=True):
        assert lie.why in event["why"]
    again = simulation.run(simulation.with_attendance(study, folder.path), tmp_path / "again", workers=0).folder
    assert (folder.path / "last.safetensors").read_bytes() == (again / "last.safetensors").read_bytes()


def test_a_score_sheet_that_cannot_be_true_is_refused_whole(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    """A lie per round. Site, round, phase and whether it is outside are not even in it: those the server says."""
    lies = list(SHEETS.values())

    def lying(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        if site != "bea" or request.do != "score" or request.full:
            return answer
        return replace(answer, body=of_sheet(lies[index_of(request)][0], answer.body))

    study = toy_study(federation, study__rounds=len(lies), study__score_every=1)
    folder = deploy(study, hospitals, tmp_path / "server", lying)
    assert {row.site for row in folder.rows() if row.phase == "train"} == {"ada", "cid"}
    said = events(folder, "unscored")
    assert [(event["site"], event["round"]) for event in said] == [("bea", i + 1) for i in range(len(lies))]
    for event, (_, why) in zip(said, lies, strict=True):
        assert why in event["why"]
    assert {row.site for row in folder.rows() if row.phase == "best"} == {"ada", "bea", "cid"}  # true ones count
    assert folder.finished


# ------------------------------------------------------------------------------------ one site is not everyone


@pytest.mark.parametrize("kind", CARDS)
def test_a_card_that_cannot_be_believed_leaves_its_site_out(
    kind: str, hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    changes, why = CARDS[kind]
    study = for_federation(toy_study(federation, study__rounds=1), tuple(SIZES))
    folder = RunFolder.create(study, tmp_path / "server")
    line = Direct(study, hospitals)
    line.words = lambda site, request, text: edited(text, **changes) if (site, request.do) == ("bea", "card") else text
    engine.run(study, FlareWire(study, folder, line), folder)
    (said,) = events(folder, "left out")
    assert said["site"] == "bea"
    assert why in said["why"]
    assert {event["site"] for event in events(folder, "train")} == {"ada", "cid"}
    assert folder.finished


def test_measurements_that_cannot_be_are_a_lost_answer(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    """One round for each."""
    lies = [{"seconds": math.nan}, {"seconds": "soon"}, {"memory_mb": -1}, {"error": 3}, {}]

    def words(site: str, request: Request, told: str) -> str:
        if (site, request.do) != ("bea", "train"):
            return told
        whole, changes = json.loads(told), lies[index_of(request)]
        return json.dumps({**whole, "tree": {**whole["tree"], **changes} if changes else []})

    rounds = {"study__rounds": len(lies), "study__score_every": len(lies)}
    study = for_federation(toy_study(federation, **rounds), tuple(SIZES))
    folder = RunFolder.create(study, tmp_path / "server")
    line = Direct(study, hospitals)
    line.words = words
    engine.run(study, FlareWire(study, folder, line), folder)
    assert [(event["site"], event["round"], event["why"]) for event in events(folder, "lost")] == [
        ("bea", i + 1, "the message was damaged on its way") for i in range(len(lies))
    ]
    assert folder.finished


@pytest.mark.parametrize("firewall", ["observe", "refuse"])
def test_an_update_of_3e38_is_left_out_and_the_run_goes_on(
    firewall: str, hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    def change(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        if (site, request.do) != ("bea", "train"):
            return answer
        lie = ANSWERS["values of 3e38"].body
        assert lie is not None
        return replace(answer, body=lie(bytes(answer.body)))

    study = toy_study(federation, study__rounds=2, study__firewall=firewall)
    folder = deploy(study, hospitals, tmp_path / "server", change)
    assert {(e["site"], "values that are too large" in e["why"]) for e in events(folder, "refused")} == {("bea", True)}
    assert folder.finished


def test_a_site_may_be_called_pooled(federation: Path, tmp_path: Path) -> None:
    """It trains on its own cases, and pooled training on everyone's: the virtual site has a name no site can have."""
    renamed = tmp_path / "federation"
    shutil.copytree(federation, renamed)
    (renamed / "cid").rename(renamed / "pooled")
    table = renamed / "pooled" / "site.toml"
    table.write_text(table.read_text().replace('"cid"', '"pooled"'))
    folder = simulation.run(toy_study(renamed, study__rounds=1), tmp_path / "runs", workers=0).folder
    (start,) = events(RunFolder.open(folder), "start")
    assert start["sites"] == {"ada": 8, "bea": 12, "pooled": 10}
    together = simulation.run(toy_study(renamed, "pooled", study__rounds=1), tmp_path / "runs", workers=0).folder
    (start,) = events(RunFolder.open(together), "start")
    assert start["sites"] == {"(pooled)": 30}
    assert {row.model for row in RunFolder.open(together).rows()} == {"pooled"}


# ------------------------------------------------------------------------------------ the hospital's own rules


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ('methods = ["fedsn"]', "there is no method 'fedsn'; did you mean 'fedsm'"),
        ('refused = ["fed-avg"]', "there is no method 'fed-avg'"),
        ('code = ["os.system"]', "'os.system' must be a name and a hash"),
        ("rounds = -1", "rounds = -1: it must be 0, for no limit, or more"),
    ],
)
def test_mistakes_in_limits_are_told_when_the_file_is_read(limits: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "hospital.toml"
    path.write_text(f'site = "ada"\ndata = "d"\nmemory = "m"\nlabels = ["blob"]\n[limits]\n{limits}\n')
    with pytest.raises(StudyError, match=re.escape(why)):
        read_hospital(path)


@pytest.mark.parametrize(
    ("limits", "write"),
    [
        ("rounds = 30\nrun_bytes = 0", "In place of rounds, run_bytes write: study_rounds = 30."),
        ("epsilon = 2.0\ntotal_epsilon = 8.0", "write: study_epsilon = 2.0; epsilon = 8.0."),
        ("total_rounds = 9\nrun_bytes = 7", "write: rounds = 9; study_bytes = 7."),
    ],
)
def test_limits_of_an_earlier_version_are_told_by_their_new_names(limits: str, write: str, tmp_path: Path) -> None:
    """`rounds` was of one run: read as of all studies, or the other way round, it would not be what was meant."""
    path = tmp_path / "hospital.toml"
    head = 'site = "ada"\ndata = "d"\nmemory = "m"\nlabels = ["blob"]\n[limits]\n'
    path.write_text(head + limits)
    with pytest.raises(StudyError, match=re.escape(write)):
        read_hospital(path)
    path.write_text(head + "rounds = 0\nmessage_bytes = 9\nrun_bytes = 0\nepsilon = 0.0\ntotal_rounds = 0\n")
    assert read_hospital(path).limits == Limits(message_bytes=9)  # nothing was limited, so nothing changes


def test_a_refused_method_has_no_other_name() -> None:
    assert not Limits(refused=("separate",)).allows("local")
    assert not Limits(refused=("local",)).allows("separate")
    assert Limits(methods=("centralized",)).allows("pooled")


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Limits(refused=("fedavg",)), "does not allow the method"),
        (Limits(methods=("fedsm",)), "does not allow the method"),
        (Limits(epsilon=4.0), "demands differential privacy, and this study has none or too little"),
    ],
)
def test_a_hospital_refuses_a_method_before_anything_is_sent(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path, limits: Limits, why: str
) -> None:
    """It is left out, and the others go on."""
    hospitals["bea"] = replace(hospitals["bea"], limits=limits)
    folder = deploy(toy_study(federation, study__rounds=1), hospitals, tmp_path / "server")
    (said,) = events(folder, "left out")
    assert said["site"] == "bea"
    assert why in said["why"]
    assert {event["site"] for event in events(folder, "train")} == {"ada", "cid"}
    assert list(folder.summary()["left_out"]) == ["bea"]
    assert [line["facts"]["error"] for line in log_of(Path(hospitals["bea"].memory))] == [
        "privacy" if limits.epsilon else "method"
    ]
    assert "Traceback" not in (Path(hospitals["bea"].memory) / "errors.log").read_text()


def test_a_study_that_too_many_refuse_says_why_and_leaves_nothing(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    for site in ("bea", "cid"):
        hospitals[site] = replace(hospitals[site], limits=Limits(refused=("fedavg",)))
    with pytest.raises(StudyError) as error:
        deploy(toy_study(federation), hospitals, tmp_path / "server")
    for site in ("bea", "cid"):
        assert f"site '{site}' cannot take part: its hospital.toml does not allow the method" in str(error.value)
    assert "1 of 3 sites are left, and a run begins with at least 2" in str(error.value)
    assert not list((tmp_path / "server").glob("*"))


@pytest.mark.parametrize(
    ("limits", "why"), [(Limits(rounds=1), "no more rounds"), (Limits(bytes=12_000), "no more bytes")]
)
def test_a_hospital_stops_at_its_own_limits(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path, limits: Limits, why: str
) -> None:
    hospitals["bea"] = replace(hospitals["bea"], limits=limits)
    folder = deploy(toy_study(federation), hospitals, tmp_path / "server")
    lost = events(folder, "lost")
    assert lost
    assert all(event["site"] == "bea" and why in event["why"] for event in lost)
    assert {event["site"] for event in events(folder, "train") if event["round"] == 3} == {"ada", "cid"}


def test_a_private_study_keeps_to_the_epsilon_it_told(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    """Three updates are paid for; of a run that bea has sent two of already (its server forgot), only one is left."""
    hospitals["bea"] = replace(hospitals["bea"], limits=Limits(epsilon=4.0))
    study = toy_study(federation, privacy__clip=1.0, privacy__noise=10.0)
    log = hospitals["bea"].place(RunFolder.path_of(for_federation(study, tuple(SIZES)), tmp_path).name) / "left.jsonl"
    log.parent.mkdir(parents=True)
    line = {"what": "train", "bytes": 9, "noise": 10.0}
    log.write_text("".join(json.dumps({**line, "sha256": str(i)}) + "\n" for i in range(2)))
    folder = deploy(study, hospitals, tmp_path / "server")
    assert [(event["site"], event["round"]) for event in events(folder, "lost")] == [("bea", 2), ("bea", 3)]
    (told,) = events(folder, "privacy")
    assert told["epsilon"] < 4.0
    simulated = simulation.run(study, tmp_path / "simulated", workers=0).folder
    first = [next(e["firewall"]["figures"] for e in events(f, "train")) for f in (folder, RunFolder.open(simulated))]
    assert first[0] != first[1]  # a hospital's noise comes from a key that nobody else has


def test_the_firewall_stands_in_a_federation_too(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    def blow_up(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        if (site, request.do) != ("bea", "train") or index_of(request) != 5:
            return answer
        (tmp_path / "reply").write_bytes(answer.body)
        packet = packet_files.read(tmp_path / "reply")
        tensors = {path: 100 * t if t.is_floating_point() else t for path, t in packet.tensors.items()}
        return replace(answer, body=packet_files.to_bytes(tree.Packet(packet.header, tensors)))

    study = toy_study(federation, study__rounds=6, study__score_every=6, study__firewall="refuse")
    folder = deploy(study, hospitals, tmp_path / "server", blow_up)
    (event,) = events(folder, "refused")
    assert (event["site"], event["round"], event["firewall"]["verdict"]) == ("bea", 6, "refused")
    away = simulation.run(replace(study, plan=replace(study.plan, away={"bea": (6,)})), tmp_path / "away", workers=0)
    assert (folder.path / "last.safetensors").read_bytes() == (away.folder / "last.safetensors").read_bytes()


def test_other_labels_are_refused(hospitals: dict[str, Hospital], federation: Path, tmp_path: Path) -> None:
    hospitals["cid"] = replace(hospitals["cid"], labels=("cup",))
    folder = deploy(toy_study(federation, study__rounds=1), hospitals, tmp_path / "server")
    (said,) = events(folder, "left out")
    assert (said["site"], said["why"]) == ("cid", "its hospital.toml names other labels (its own log says more)")


def test_another_version_is_refused(hospitals: dict[str, Hospital], federation: Path, tmp_path: Path) -> None:
    def change(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        if site != "ada" or answer.head.card is None:
            return answer
        return replace(answer, head=replace(answer.head, card=replace(answer.head.card, version="0.0.9")))

    folder = deploy(toy_study(federation, study__rounds=1), hospitals, tmp_path / "server", change)
    (said,) = events(folder, "left out")
    assert said["why"].startswith("it has another version: 0.0.9 where the server has")


def test_code_of_others_is_not_even_imported(federation: Path, tmp_path: Path) -> None:
    hospital = Hospital("ada", str(federation / "ada"), str(tmp_path), ("blob",), "cpu")
    text = '[data]\nfederation = ""\n[method]\nname = "no_such_package.at_all:Method"\n'
    answer = HospitalSite(hospital, "ada", text).answer(Request("card", "r"), b"")
    assert answer.head.error == "method"  # had it been imported, this would be "study"


FIRST = Round(0, "train", 0, 3)
ASKED: list[tuple[Request, str]] = [
    (Request("card", "another-run"), "foreign"),
    (Request("train", "RUN", "fedsm", FIRST), "foreign"),
    (Request("train", "RUN", "fedavg"), "foreign"),
    (Request("train", "RUN", "fedavg", Round(700, "train", 700, 3)), "foreign"),
    (Request("train", "RUN", "fedavg", Round(1, "calibrate", 0, 3)), "foreign"),
    (Request("train", "RUN", "fedavg", FIRST), "foreign"),  # its roll call was not answered here
    (Request("score", "RUN", "fedavg", FIRST), "foreign"),
]


@pytest.mark.parametrize(("request_", "word"), ASKED)
def test_what_is_not_of_this_study_is_refused(federation: Path, tmp_path: Path, request_: Request, word: str) -> None:
    hospital = Hospital("ada", str(federation / "ada"), str(tmp_path), ("blob",), "cpu")
    study = toy_study(federation)
    own = RunFolder.path_of(study, tmp_path).name
    asked = replace(request_, run=request_.run.replace("RUN", own))
    head = HospitalSite(hospital, "ada", study.to_toml()).answer(asked, b"").head
    assert head.error == word
    told = (tmp_path / "errors.log").read_text()
    assert word in told and "Traceback" not in told  # a rule of the hospital is no bug
    (line,) = log_of(tmp_path)
    assert (line["what"], line["asked"], line["run"], line["facts"]) == ("failed", asked.do, asked.run, plain(head))


def test_what_is_no_request_is_answered_with_a_word_that_is_logged(federation: Path, tmp_path: Path) -> None:
    """The word is all that leaves, and the log has it: too large, unreadable, or of a site that cannot be opened."""
    hospital = Hospital("ada", str(federation / "ada"), str(tmp_path), ("blob",), "cpu")
    site = HospitalSite(hospital, "ada", toy_study(federation).to_toml())
    heads = [site.turn_away("order", "an order of 9 bytes").head, site.turn_away("damaged").head]
    heads.append(ClosedSite(tmp_path).turn_away("damaged").head)
    assert heads == [AnswerHead("order"), AnswerHead("damaged"), AnswerHead("opening")]
    assert [line["facts"] for line in log_of(tmp_path)] == [plain(head) for head in heads]
    assert "an order of 9 bytes" in (tmp_path / "errors.log").read_text()


def test_a_failure_that_cannot_be_logged_says_nothing_but_one_word(tmp_path: Path) -> None:
    (tmp_path / LOG).mkdir()
    assert log_failure(tmp_path, None, AnswerHead("failed", 3.0, 99.0)) == AnswerHead("disk")


def test_a_refused_roll_call_opens_no_run(federation: Path, tmp_path: Path) -> None:
    """It has a line in the log like every answer, and is still no consent to train."""
    request = Request("train", "fedavg-s0-1", "fedavg", FIRST)
    log_failure(tmp_path, replace(request, do="card"), AnswerHead("approval"))
    with pytest.raises(Refused) as refused:
        HospitalPolicy(Limits(), ("blob",), b"k" * 32, tmp_path).before(request, toy_study(federation))
    assert refused.value.word == "foreign"


def test_a_request_for_a_folder_elsewhere_is_refused_at_the_door(federation: Path, tmp_path: Path) -> None:
    hospital = Hospital("ada", str(federation / "ada"), str(tmp_path), ("blob",), "cpu")
    site = HospitalSite(hospital, "ada", toy_study(federation).to_toml())
    for run in ("../r", "/etc", ".", "", "a/b", "a\\b", "a" * 300):
        assert site.read(tree.to_text(OrderHead("0" * 32, 1.0, Request("card", run)))) is None
    assert "'request/run' cannot be '../r'" in (tmp_path / "errors.log").read_text()


def test_a_full_disk_is_one_word(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from consilium.store import MemoryStore

    put = MemoryStore.put

    def full(memories: MemoryStore, round: int, *rest: Any) -> None:
        if memories.site == "bea" and round == 1:
            raise OSError(28, "No space left on device", "/secret/place")
        put(memories, round, *rest)

    monkeypatch.setattr(MemoryStore, "put", full)
    folder = deploy(toy_study(federation, "scaffold"), hospitals, tmp_path / "server")
    (event,) = events(folder, "lost")
    assert event["why"] == "its disk is full or cannot be written"
    assert "/secret/place" in (Path(hospitals["bea"].memory) / "errors.log").read_text()


# ------------------------------------------------------------------------------------ who is there


class Slow(Direct):
    """Everyone answers at once but cid, who sleeps until woken; with `leaves`, its process ends meanwhile."""

    def __init__(self, leaves: bool) -> None:
        self.woken = threading.Event()
        self.returned: set[str] = set()
        self.leaves = leaves

    def ask(self, site: str, request: Request, body: Body, seconds: float, room: int) -> FlareAnswer:
        if site == "cid":
            self.returned = {"cid"} if self.leaves else set()
            assert self.woken.wait(150)
        return FlareAnswer(AnswerHead("failed", 1.0, 1.0))

    def here(self) -> set[str]:
        return set(SIZES)


@pytest.mark.parametrize(("back", "why"), [(False, "no answer by the deadline"), (True, "its process has ended")])
def test_who_is_late_or_gone_is_not_waited_for(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool, why: str
) -> None:
    study = for_federation(toy_study(federation, study__deadline=600.0), tuple(SIZES))
    line = Slow(leaves=back)
    folder = RunFolder.create(study, tmp_path)
    wire = FlareWire(study, folder, line)

    def now() -> float:
        """The deadline passes once the others have answered, however long that takes."""
        return 1000.0 if not back and len(events(folder, "undelivered")) == 2 else 0.0

    monkeypatch.setattr("consilium.wires.flare.time", SimpleNamespace(monotonic=now))
    head = Envelope(folder.path.name, "fedavg", Round(0, "train", 0, 1))
    wire.deliver(dict.fromkeys(SIZES, tree.Packet("{}", {})), head)
    line.woken.set()
    said = {event["site"]: event["why"] for event in events(folder, "undelivered")}
    assert said == {"ada": "training failed there", "bea": "training failed there", "cid": why}


def test_a_run_begins_without_a_site_that_is_absent(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    """Its bits are those of a study of the others; and a simulation repeats it."""
    local = toy_study(federation, study__rounds=1, study__score_every=1)
    study = for_federation(local, tuple(SIZES))
    folder = RunFolder.create(study, tmp_path / "server")
    line = Direct(study, hospitals)
    line.absent = {"cid"}
    engine.run(study, FlareWire(study, folder, line), folder)
    (said,) = events(folder, "left out")
    assert (said["site"], said["why"]) == ("cid", "it did not answer the roll call: it is not connected")
    repeated = simulation.run(simulation.with_attendance(local, folder.path), tmp_path / "again", workers=0).folder
    assert (folder.path / "last.safetensors").read_bytes() == (repeated / "last.safetensors").read_bytes()


@pytest.mark.parametrize(("absent", "quorum"), [({"bea", "cid"}, 0.5), ({"cid"}, 3)])
def test_a_run_does_not_begin_below_its_quorum(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path, absent: set[str], quorum: float
) -> None:
    study = for_federation(toy_study(federation, study__quorum=quorum), tuple(SIZES))
    folder = RunFolder.create(study, tmp_path / "server")
    line = Direct(study, hospitals)
    line.absent = absent
    with pytest.raises(WorkError, match="site 'cid' cannot take part: it did not answer the roll call"):
        engine.run(study, FlareWire(study, folder, line), folder)
    assert not folder.begun


def test_a_run_goes_on_without_a_site_that_refuses_now(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    study = for_federation(toy_study(federation, study__rounds=3), tuple(SIZES))
    folder = RunFolder.create(study, tmp_path / "server")
    line = Direct(study, hospitals)

    def stop(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        if request.do == "train" and index_of(request) == 1:
            raise WorkError("stopped")
        return answer

    line.change = stop
    with pytest.raises(WorkError, match="stopped"):
        engine.run(study, FlareWire(study, folder, line), folder)
    hospitals["bea"] = replace(hospitals["bea"], limits=Limits(refused=("fedavg",)))
    folder = RunFolder.open(folder.path)
    engine.run(study, FlareWire(study, folder, Direct(study, hospitals)), folder)
    assert [event["site"] for event in events(folder, "left out")] == ["bea"]
    assert {event["site"] for event in events(folder, "train") if event["round"] == 3} == {"ada", "cid"}


def test_a_run_goes_on_without_a_site_and_lets_it_in_again(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    study = for_federation(toy_study(federation, "scaffold", study__rounds=5), tuple(SIZES))
    folder = RunFolder.create(study, tmp_path / "server")
    line = Direct(study, hospitals)

    def dies(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        if site == "bea" and request.do == "train" and index_of(request) == 1:
            line.absent = {"bea"}
            return FlareAnswer.of("late")
        if site == "ada" and request.do == "train" and index_of(request) == 2:
            line.returned = {"bea"}
        return answer

    line.change = dies
    with pytest.raises(RestartJob, match="bea"):
        engine.run(study, FlareWire(study, folder, line), folder)
    folder = RunFolder.open(folder.path)
    engine.run(study, FlareWire(study, folder, Direct(study, hospitals)), folder)  # a new job
    assert [event["round"] for event in events(folder, "lost")] == [2, 3]
    plain = toy_study(federation, "scaffold", study__rounds=5)
    again = simulation.run(simulation.with_attendance(plain, folder.path), tmp_path / "again", workers=0).folder
    assert (folder.path / "last.safetensors").read_bytes() == (again / "last.safetensors").read_bytes()


def test_a_stray_message_at_the_roll_call_does_not_spoil_a_new_run(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    class Stray(Direct):
        def dropped(self) -> list[tuple[str, str]]:
            return [("bea", "an answer nobody waits for any more")] * 1000

    study = for_federation(toy_study(federation, study__rounds=1), tuple(SIZES))
    folder = RunFolder.create(study, tmp_path / "server")
    engine.run(study, FlareWire(study, folder, Stray(study, hospitals)), folder)
    assert folder.events()[0]["event"] == "start"
    dropped = events(folder, "dropped")
    assert {(event["site"], event["times"]) for event in dropped} == {("bea", 1000)}  # one line, however many came


def test_fewer_than_min_sites_stop_with_a_remedy(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    def change(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        return FlareAnswer.of("late") if site != "ada" and request.do == "train" else answer

    study = toy_study(federation, study__min_sites=2)
    with pytest.raises(WorkError, match=r"1 of 3 sites answered, but min_sites is 2 .*no answer by the deadline"):
        deploy(study, hospitals, tmp_path / "server", change)


def test_pooled_training_cannot_be_deployed(federation: Path) -> None:
    with pytest.raises(StudyError, match="simulation only"):
        for_federation(toy_study(federation, "pooled"), tuple(SIZES))


def test_a_hospital_toml_is_read_and_mistakes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "hospital.toml"
    path.write_text('site = "ada"\ndata = "d"\nmemory = "m"\nlabels = ["blob"]\n[limits]\nrounds = 3\n')
    hospital = read_hospital(path)
    assert (hospital.memory, hospital.limits.rounds) == (str(tmp_path / "m"), 3)
    path.write_text('site = "ada"\ndata = "d"\nmemory = "m"\nlabels = ["blob"]\n[limits]\nround = 3\n')
    with pytest.raises(StudyError, match="did you mean 'rounds'"):
        read_hospital(path)


def test_a_message_that_arrives_is_not_written_out_as_text() -> None:
    """The engine formats what it received for its debug log; a part of 16 MB would become 45 MB of text."""
    import consilium.federation.parts  # noqa: F401  # job processes import it

    assert len(f"{ConsumableBufferList([bytes(1000)])}") < 50


@pytest.mark.parametrize(("method", "transport"), [("fedavg", "float16"), ("apple", "bfloat16"), ("scaffold", "exact")])
def test_packed_messages_give_the_bits_of_the_simulation(
    method: str, transport: str, hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    """What is lost by rounding is lost in both; packing loses nothing, and the journal counts what travelled."""
    study = toy_study(federation, method, study__transport=transport, study__compress=True)
    bodies: dict[str, list[int]] = {}

    def listen(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        if request.do == "train":
            bodies.setdefault(site, []).append(len(answer.body))
        return answer

    folder = deploy(study, hospitals, tmp_path / "server", listen)
    simulated = simulation.run(study, tmp_path / "simulated", workers=0).folder
    assert (folder.path / "last.safetensors").read_bytes() == (simulated / "last.safetensors").read_bytes()
    counted: dict[str, list[int]] = {}
    for event in events(folder, "train"):  # sites answer side by side: only each site's own order is fixed
        counted.setdefault(event["site"], []).append(event["bytes_up"])
    assert counted == bodies


def test_a_forecast_counts_what_the_server_writes_once_only_once(federation: Path) -> None:
    """All sites calibrate with the same models: one file at the server, however many sites read it."""
    network = {"method__selector_training": "synchronised"}  # toys have models smaller than the sums of a closed form
    found = forecast_study(toy_study(federation, "fedsm", **network), 8)
    trained, calibrated = found.exchanges[2], found.exchanges[-1]  # by round 3 every site has a model of its own
    assert calibrated.phase == "calibrate"
    assert calibrated.spool < 1.5 * calibrated.down
    assert trained.spool == pytest.approx(8 * (trained.down + trained.up), rel=0.05)
    (line,) = (line for line in found.lines(50) if line.startswith("at the server"))
    assert "in files of its run folder" in line
    closed = forecast_study(toy_study(federation, "fedsm"), 8).exchanges[-1]  # its selector is sums of the sites'
    assert (closed.phase, closed.spool) == ("calibrate", closed.down + 8 * closed.up)
    half = forecast_study(toy_study(federation, "fedsm", study__transport="float16", **network), 8)
    assert 0.5 * found.down < half.down < 0.8 * found.down  # headers do not shrink
