"""FedSM's selector in closed form: its exchanges, what travels, absent sites, outliers, in runs from end to end."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import packet_files, simulation, tree
from consilium.describe import describe
from consilium.errors import StudyError
from consilium.learning.discriminant import Discriminant, FeatureSums, discriminant, sums_of
from consilium.method import Best, Valid
from consilium.methods.fedsm import FedSM
from consilium.methods.routers import DiscriminantRouter
from consilium.methods.routing import SuperModel
from consilium.prediction import open_predictor
from consilium.reports.drawings import selected
from consilium.reports.grouping import groups
from consilium.reports.reading import read_run
from consilium.run_folder import RunFolder
from consilium.site import SiteCard
from consilium.site_opening import open_worker
from consilium.study import Study
from consilium.tasks.features import feature_count
from consilium.timeline import timeline
from consilium.weights import Weights
from tests.learning.small import Line, line
from tests.toy import SIZES, toy_study

ROSTER = {name: SiteCard(name, i, n, ("blob",)) for i, (name, (n, _, _)) in enumerate(SIZES.items())}


closed = partial(FedSM, selector_training="discriminant")


def toy(federation: Path, **fields: Any) -> Study:
    return toy_study(federation, "fedsm", method__selector_training="discriminant", **fields)


def done(federation: Path, place: Path, **fields: Any) -> Any:
    return simulation.run(toy(federation, **fields), place, workers=0)


def events(result: Any, kind: str = "train") -> list[dict[str, Any]]:
    return [event for event in RunFolder.open(result.folder).events() if event["event"] == kind]


# ------------------------------------------------------------------------------------------------ phases and messages


def test_two_exchanges_before_calibration_start_from_the_best_models() -> None:
    phases = closed().phases(5)
    assert [(p.name, p.rounds, p.counts, p.from_best) for p in phases] == [
        ("train", 5, True, False), ("statistics", 1, False, True), ("routing", 1, False, False),
        ("calibrate", 1, False, False),
    ]  # fmt: skip
    assert [p.name for p in closed(confidence=0.9).phases(5)] == ["train", "statistics", "routing"]
    adapted = closed(personal="finetune").phases(5)
    assert [(p.name, p.from_best) for p in adapted[1:3]] == [("adapt", True), ("statistics", False)]


def test_no_selector_travels_in_a_round(federation: Path, tmp_path: Path) -> None:
    """2|w_g| each way within 2 %; once n, mean and the upper triangle of the scatter, in float64."""
    result = done(federation, tmp_path, study__rounds=1, task__widths=[16, 32, 64])
    study = toy(federation, task__widths=[16, 32, 64])
    count = feature_count(study.task)
    assert count == 2 * (16 + 32 + 64)
    sent = {event["phase"]: event for event in events(result)}
    for way in ("bytes_up", "bytes_down"):
        assert sent["train"][way] == pytest.approx(8 * study.task.shape().numel(), rel=0.03)
    assert sent["statistics"]["bytes_up"] == pytest.approx(8 * (count + count * (count + 1) // 2), rel=0.02)
    assert sent["statistics"]["bytes_down"] == pytest.approx(4 * study.task.shape().numel(), rel=0.05)
    assert sent["routing"]["bytes_up"] < 10_000


def test_the_sites_sums_are_those_of_the_stacked_features(federation: Path, tmp_path: Path) -> None:
    study = toy(federation, local__batch_size=3)
    here = open_worker(study, study.federation(), "bea", ROSTER, tmp_path).site
    method = study.method
    round = timeline(method, 3)[3][1]
    assert round.phase == "statistics"
    order = method.send(method.start(study.task, ROSTER), ROSTER["bea"], round)
    assert order.personal is None and order.selector is None
    uplink, _ = method.train(here, method.remember(here), order, round)
    (whole,) = here.data.whole("train", 100)
    by_hand = sums_of(study.task.features(order.global_, whole.images))
    assert uplink.features.n == by_hand.n == ROSTER["bea"].n
    torch.testing.assert_close(uplink.features.mean, by_hand.mean, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(uplink.features.scatter, by_hand.scatter, rtol=1e-4, atol=1e-7)
    assert (uplink.global_, uplink.personal, uplink.loss) == (None, None, 0.0)


def test_what_leaves_is_told() -> None:
    page = describe("fedsm")
    assert "once, after training: number, mean, scatter of its cases' features" in page
    assert "for every γ of a grid, sums of scores of validation cases" in page


def test_privacy_is_refused_with_a_sentence(federation: Path) -> None:
    with pytest.raises(StudyError, match=r"\[privacy\] noise: with 'fedsm'"):
        toy(federation, privacy__clip=1.0, privacy__noise=1.0)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"outlier_quantile": 0.4}, "[method] outlier_quantile = 0.4: it must be in [0.5, 1]."),
        ({"selector_training": "discriminate"}, "it must be one of discriminant, synchronised, moments, paper."),
        ({"selector_training": "paper", "score_selector": True}, "score_selector is for selector_training"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StudyError, match=re.escape(sentence)):
        FedSM(**fields)


# ------------------------------------------------------------------------------------------------ whole runs


def test_models_alone_are_scored_until_the_exchange_and_the_super_model_is_the_headline(
    federation: Path, tmp_path: Path
) -> None:
    result = done(federation, tmp_path, study__rounds=3, study__score_every=1)
    rows = RunFolder.open(result.folder).rows()
    assert {row.model for row in rows if row.phase == "train"} == {"global", "personal"}
    assert {row.model for row in rows if row.phase == "best"} == {"global", "personal", "super"}
    assert result.summary["headline"]["model"] == "super" and "site_mean" in result.summary["headline"]
    assert set(result.summary["best"]["rounds"]) == {"global:pooled", *(f"personal/{site}" for site in SIZES)}
    server = packet_files.load(result.folder / "best.safetensors", FedSM.Server)
    assert server.discriminant is not None and server.discriminant.sites == list(SIZES)
    assert server.selector is None and server.router is None


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("apfl", "perfedavg", "pfedme")]


@pytest.mark.parametrize("personal", ["finetune", *SLOW])
def test_it_works_with_every_partner(personal: str, federation: Path, tmp_path: Path) -> None:
    fields = {"strength": 1.0, "inner_lr": 0.3, "lr": 0.5} if personal == "pfedme" else {}
    result = done(federation, tmp_path, method__personal=personal, method__personal_fields=fields)
    assert "routed" in result.summary["best"]["scores"]["super"]
    assert [e for kind in ("lost", "refused") for e in events(result, kind)] == []


@pytest.mark.slow
def test_curves_on_request(federation: Path, tmp_path: Path) -> None:
    """With score_selector the super model is scored on the way; its bytes count, in scored rounds only."""
    result = done(federation, tmp_path, study__rounds=4, study__score_every=2, method__score_selector=True)
    rows = RunFolder.open(result.folder).rows()
    assert {row.round for row in rows if row.phase == "train" and row.model == "super"} == {2, 4}
    sizes = {e["round"]: e["bytes_up"] for e in events(result) if e["phase"] == "train" and e["site"] == "ada"}
    assert sizes[2] > sizes[1] + 1000 and sizes[4] > sizes[3] + 1000
    assert abs(sizes[1] - sizes[3]) < 100
    without = done(federation, tmp_path / "without", study__rounds=4, study__score_every=2)
    one, other = (packet_files.load(run.folder / "best.safetensors", FedSM.Server) for run in (result, without))
    assert one.global_.digest == other.global_.digest  # what is scored changes nothing that is trained
    assert one.router is None and one.discriminant.covariance.equal(other.discriminant.covariance)


def test_a_site_that_is_away_from_the_exchange_cannot_be_named(federation: Path, tmp_path: Path) -> None:
    """Its personal model stays, is scored at home and can be asked for by name; no image is routed to it."""
    result = done(federation, tmp_path, study__away={"bea": ["statistics"]})
    server = packet_files.load(result.folder / "best.safetensors", FedSM.Server)
    assert server.discriminant.sites == ["ada", "cid"]
    assert set(server.personal) == set(SIZES)
    routed = result.summary["best"]["scores"]["super"]["routed"][""]
    assert set(routed["sites"]) == {"ada", "cid"}
    assert [(e["phase"], e["site"]) for e in events(result, "away")] == [("statistics", "bea")]
    picture = selected(groups([read_run(result.folder)])[0])
    assert picture is not None and "it cannot name bea, away when it was made" in picture.caption
    _, own = open_predictor(result.folder, "bea")
    assert own.of == "bea"


@pytest.mark.federation
def test_processes_send_the_same_bits(federation: Path, tmp_path: Path) -> None:
    study = toy(federation, study__rounds=1)
    digests = set()
    for workers in (0, 2):
        result = simulation.run(study, tmp_path / str(workers), workers=workers)
        digests.add((result.folder / "best.safetensors").read_bytes())
    assert len(digests) == 1


def test_runs_of_version_0_1_are_read(tmp_path: Path) -> None:
    """A server's state without the fields of the discriminant."""
    fields = {"global_": line(1.0), "personal": {"ada": line(2.0)}, "selector": line(3.0), "selector_state": None}
    now = FedSM.Server(**fields, shared=None, confidence=0.5, n={"ada": 3})  # type: ignore[arg-type]
    packet = tree.flatten(now)
    old = packet.header.replace(r"\"discriminant\":null,", "").replace(r",\"router\":null", "")
    assert old != packet.header and "router" not in old
    packet_files.write(tree.Packet(old, packet.tensors), tmp_path / "old.safetensors")
    read = packet_files.load(tmp_path / "old.safetensors", FedSM.Server)
    assert (read.discriminant, read.router, read.confidence) == (None, None, 0.5)


# ------------------------------------------------------------------------------------------------ routing


class Seen(Line):
    """An image is one number, and so is its feature; a model multiplies it by its weight."""

    def infer(self, weights: Weights, images: Any, kind: str = "model", labels: Any = None) -> torch.Tensor:
        return images @ weights["weight"].T

    def features(self, weights: Weights, images: torch.Tensor) -> torch.Tensor:
        return images.double()


def two_sites(limits: dict[str, float], temperature: float = 1.0) -> Discriminant:
    """Means 0 and 4, shared variance 1: at x = 2 even odds, at x = 1 ada's are e^(½(9 − 1)) = e⁴ to 1."""
    means = {"ada": torch.tensor([0.0]).double(), "bea": torch.tensor([4.0]).double()}
    return Discriminant(means, torch.tensor([1.0]).double(), 0.0, temperature, limits)


def routed(found: Discriminant, *images: float, gamma: float = 0.0) -> SuperModel:
    router = DiscriminantRouter(Seen(), line(1.0), found)
    return SuperModel(Seen(), line(10.0), {"ada": line(1.0), "bea": line(2.0)}, router, gamma, "ada")


def test_probabilities_and_reasons_by_hand() -> None:
    model = routed(two_sites({"ada": 3.0, "bea": 2.5}), gamma=0.5)
    near, even, far = model.answer(torch.tensor([[1.0], [2.0], [-3.1]])).choices
    assert near.key == "personal/ada" and near.chances["ada"] == pytest.approx(1 / (1 + 2.718281828**-4), abs=1e-4)
    assert near.why == "most like ada (0.982 > 0.5)"
    assert even.key == "global" and even.why.startswith("not sure of any site")
    assert far.key == "global" and far.why == "unlike all two sites (nearest ada, distance 3.1 > 3)"


def test_an_image_is_unlike_all_only_if_it_is_beyond_every_limit() -> None:
    """x = 7: 3 from bea, inside its limit of 3.5, though far beyond ada's."""
    model = routed(two_sites({"ada": 1.0, "bea": 3.5}))
    inside, beyond = model.answer(torch.tensor([[7.0], [7.6]])).choices
    assert (inside.key, beyond.key) == ("personal/bea", "global")
    free, = routed(two_sites({})).answer(torch.tensor([[1e6]])).choices  # fmt: skip
    assert free.key == "personal/bea"  # no limits, nothing is unlike


def test_a_volume_is_routed_by_the_mean_of_its_slices_features() -> None:
    """Slices at 0 and 3 lie on both sides of the middle; their mean, 1.5, is nearer to ada."""
    images = torch.tensor([[0.0], [3.0]])
    model = routed(two_sites({}))
    assert [c.of for c in model.answer(images, volume=True).choices] == ["ada", "ada"]
    model.route = "slice"
    assert [c.of for c in model.answer(images, volume=True).choices] == ["ada", "bea"]


def test_jointly_best_without_a_super_model_is_by_the_personal_models() -> None:
    server = FedSM.Server(line(1.0), {"ada": line(1.0)}, None, None, None, 0.0, {"ada": 1})
    first, second = (
        Best(server, {"personal": Valid(x, i), "global": Valid(1 - x, i)}) for i, x in ((1, 0.8), (2, 0.7))
    )
    assert closed(best="joint").keep(first, second) is first
    assert closed(best="joint").keep(second, first) is first


def test_a_federation_without_validation_cases_has_a_discriminant_too() -> None:
    sums = {
        name: FeatureSums(3, torch.randn(4, dtype=torch.float64), torch.rand(10, dtype=torch.float64)) for name in SIZES
    }
    found = discriminant(sums)
    assert found.temperature == 1.0 and found.limits == {} and 0 < found.shrinkage <= 1
