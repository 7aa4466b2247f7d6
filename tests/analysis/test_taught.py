"""What sites are taught with, against the hidden truth; labels by round; rows of an ablation side by side."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.analysis import ablation, label_curves, pseudo_labels
from consilium.analysis.agreement import branch, percent, shared
from consilium.analysis.analyse import ANALYSES, analyse
from consilium.analysis.finding import Options
from consilium.analysis.labelled_cases import GLOBAL, REFINED, TEACHERS, Labelled
from consilium.analysis.opening import OpenRun, Runs, open_run
from consilium.analysis.probing import models_at, network_of, training_batches
from consilium.analysis.pseudo_labels import Quality
from consilium.errors import RunError, StudyError
from consilium.learning.main_teacher import refined
from consilium.learning.noisy_labels import left_out, reverse_cross_entropy, reverse_factor
from consilium.learning.pseudo_labels import combined_labels, maps_of, teacher_outputs, with_truth
from consilium.methods.ufps import UFPS
from consilium.methods.ufps_modules import LabelNoise, MainTeacher, TeacherUncertainty, begun
from consilium.reports.findings import findings
from consilium.reports.grouping import groups
from consilium.reports.reading import Curve, read_run
from consilium.simulation import run
from consilium.timeline import timeline
from tests.toy import toy_study, write_organs

pytestmark = pytest.mark.xdist_group("analysis")  # what its tests share is made once

TRAINED = {"study__rounds": 2, "study__score_every": 1, "data__test_masks": "complete", "local__lr": 0.02}


@pytest.fixture(scope="module")
def made(organs: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """UFPS whose main teacher is heard in the second round, and FedAvg* with two seeds."""
    runs = tmp_path_factory.mktemp("taught")
    ufps = {"study__keep_rounds": "all", "method__teachers__rounds": 3, "method__main_teacher__start": 2.0}
    studies = {
        "ufps": toy_study(organs, "ufps", **TRAINED, **ufps),
        "pl": toy_study(organs, "fedavg-pl", **TRAINED, method__teachers__rounds=3),
        "pl-1": toy_study(organs, "fedavg-pl", **TRAINED, method__teachers__rounds=3, study__seed=1),
    }
    return {name: run(study, runs, workers=0).folder for name, study in studies.items()}


@pytest.fixture(scope="module")
def ufps(made: Mapping[str, Path]) -> OpenRun:
    return open_run(made["ufps"])


def facts_of(folder: Path, name: str) -> dict:  # type: ignore[type-arg]
    found: dict = json.loads((folder / f"{name}.json").read_text())  # type: ignore[type-arg]
    return found


# ------------------------------------------------------------------------------------ pseudo labels


def test_quality_by_hand() -> None:
    """Four voxels of organ 2: teachers hit three and one beside; the main teacher leaves one of its two misses out."""
    truth = torch.tensor([2, 2, 2, 2, 0, 1])
    teachers = torch.tensor([2, 2, 2, 0, 2, 1])
    refined = torch.tensor([2, 2, 0, 0, 0, 1])
    ignored = torch.tensor([False, False, True, False, True, False])
    one = Labelled("a", truth, truth, {TEACHERS: teachers, REFINED: refined}, ignored, teachers, None)
    found = pseudo_labels._case_quality(one, {"square": 2, "ring": 3})
    assert set(found) == {"square"}  # the truth has no ring
    assert found["square"][TEACHERS] == pytest.approx((2 * 3 / (4 + 4), 0))
    assert found["square"][REFINED] == pytest.approx((2 * 2 / (3 + 2), 1 / 4))
    nothing = Quality(None, 1.0)  # a case of which all voxels were left out has no Dice, and counts as left out
    assert pseudo_labels._mean_quality([found["square"], {TEACHERS: Quality(0.25, 0), REFINED: nothing}]) == {
        TEACHERS: pytest.approx((0.5, 0)),
        REFINED: pytest.approx((0.8, 0.625)),
    }


def test_the_labels_are_those_that_the_site_trained_on(ufps: OpenRun) -> None:
    """What the analysis calls the teachers' labels lies, with the site's annotation, in its memory's maps."""
    site = ufps.worker("ada").site
    drawn = {name: card.labels for name, card in site.roster.items()}
    maps = maps_of(site, ufps.server.teachers, drawn, ())
    kept = ufps.worker("ada").kept(ufps.merged["ada"])
    found = list(pseudo_labels.labelled(ufps, "ada", ufps.server))
    assert [one.case for one in found] == list(site.data.cases("train"))
    for one in found:
        assert torch.equal(maps.labels[one.case], kept.memory.teaching.maps.labels[one.case])
        assert torch.equal(one.claimed, maps.labels[one.case][1])
        annotated = one.truth == 1  # ada draws the disc
        assert torch.equal(one.labels[TEACHERS], torch.where(annotated, 1, maps.labels[one.case][0]))
        assert (one.truth == 2).any()  # and never saw this
        assert all((mask[annotated] == 1).all() for mask in one.labels.values())


def test_curvature_is_of_the_loss_that_was_trained(ufps: OpenRun) -> None:
    """Pseudo labels, aRCE and the main teacher are in it; the loss of the annotated organ alone is another."""
    (model,) = models_at([ufps], "ada")
    method, round = ufps.study.method, ufps.round
    assert isinstance(method, UFPS)
    probe = model.probes(2)[0]
    network = network_of(model.site.task, model.weights)
    task, batch = model.site.task, probe.batch
    output = network(batch.images)
    heard = combined_labels(
        teacher_outputs(task, ufps.server.teachers, {n: c.labels for n, c in model.site.roster.items()}, batch.images),
        task.labels,
        model.site.card.labels,
        batch.bare,
        (),
    )
    labels, ignored = heard.others, None
    if method.send(ufps.server, model.site.card, round).gmt:
        own = torch.tensor([False, True, False])
        decided = task.infer(ufps.server.global_, batch.images).argmax(1).to(heard.others)
        labels, doubtful = refined(heard, decided, own & ~batch.bare[:, None], 0.8, True, True)
        ignored = doubtful & (batch.truth == 0)
    target = replace(batch, truth=with_truth(labels, batch.truth), labels=None)
    seen = output if ignored is None else left_out(output, ignored)
    expected = task.loss(seen, target)
    if begun(method.noise.start, round):
        factor = 0.01 * reverse_factor(round.step, round.total, 20.0)
        expected = expected + factor * reverse_cross_entropy(seen, target.truth)
    assert probe.loss(output).item() == pytest.approx(expected.item(), rel=1e-6)
    assert probe.loss(output).item() != pytest.approx(task.loss(output, batch).item(), rel=1e-3)


@pytest.mark.slow
def test_an_early_round_is_weighed_by_the_uncertainty_of_its_cases(ufps: OpenRun) -> None:
    worker = ufps.worker("ada")
    early = TeacherUncertainty(weigh_from=1.0, weigh_until=2.0)
    off: Any = {"main_teacher": MainTeacher("pretrained"), "noise": LabelNoise(0.0)}
    method = replace(ufps.study.method, uncertainty=early, **off)
    memory = worker.kept(ufps.merged["ada"]).memory
    assert memory.bank.max() > memory.bank.min()
    first = timeline(method, 2)[-2][1]
    batch = training_batches(worker.site, 2)[0]
    output = network_of(worker.site.task, ufps.server.global_)(batch.images)
    losses = [
        method.trained_loss(worker.site, ufps.server, kept, first)(batch)(output).item() for kept in (memory, None)
    ]
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)  # without the bank nothing is weighed


def test_pseudo_labels_of_runs(made: Mapping[str, Path], tmp_path: Path) -> None:
    analyse([made["ufps"]], ["pseudo-labels"], tmp_path / "ufps")
    facts = facts_of(tmp_path / "ufps", "pseudo-labels")
    assert {site: list(organs) for site, organs in facts["sites"].items()} == {"ada": ["square"], "bea": ["round"]}
    for organs in facts["sites"].values():  # cid annotates both and is taught nothing
        for by in organs.values():
            assert list(by) == [TEACHERS, GLOBAL, REFINED]
            assert all(0 <= by[who]["dice"] <= 1 for who in (TEACHERS, GLOBAL))
    assert facts["figures"] == ["pseudo-labels.svg", "pseudo-labels-rounds.svg"]
    rounds = facts["rounds"]
    assert {number: one["taught"] for number, one in rounds.items()} == {"1": True, "2": True}
    dice = [one["sites"]["ada"]["square"][TEACHERS]["dice"] for one in rounds.values()]
    assert dice[0] == dice[1] == facts["sites"]["ada"]["square"][TEACHERS]["dice"]  # teachers never change
    assert rounds["1"]["sites"] != rounds["2"]["sites"]
    assert "| ada | square |" in (tmp_path / "ufps" / "pseudo-labels.md").read_text()

    analyse([made["pl"]], ["pseudo-labels"], tmp_path / "pl", Options(site="bea"))
    facts = facts_of(tmp_path / "pl", "pseudo-labels")
    assert list(facts["sites"]) == ["bea"] and list(facts["sites"]["bea"]["round"]) == [TEACHERS]
    assert facts["rounds"] == {} and facts["figures"] == ["pseudo-labels.svg"]


def test_what_has_no_hidden_truth_says_so(
    made: Mapping[str, Path], finished: Mapping[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="has no pseudo labels"):
        analyse([finished["fedavg"]], ["pseudo-labels"], tmp_path)
    with pytest.raises(StudyError, match="there is no site 'dan'; the runs have ada, bea, cid"):
        analyse([made["pl"]], ["pseudo-labels"], tmp_path, Options(site="dan"))
    with pytest.raises(RunError, match="show only what the sites annotate"):
        analyse([made["pl"]], ["pseudo-labels"], tmp_path, Options(site="cid"))


# ------------------------------------------------------------------------------------ agreement


def test_the_intersection_percentage_by_hand() -> None:
    claimed, decided = torch.tensor([1, 1, 2, 0, 2, 0]), torch.tensor([1, 2, 2, 2, 0, 0])
    assert shared(claimed, decided) == pytest.approx(2 / 4)
    assert shared(claimed, decided, 1) == 1
    assert shared(claimed, decided, 2) == pytest.approx(1 / 3)
    assert shared(claimed, decided, 3) is None
    assert (percent(2 / 3), percent(None)) == ("67 %", "–")


def test_the_branch_of_the_equation_is_told() -> None:
    told = [branch(share, UFPS(main_teacher=MainTeacher(agreement=0.6))) for share in (0.6, 0.59, None)]
    assert told == ["≥ 60 %: both", "< 60 %: the global model", "≥ 60 %: both"]
    assert branch(0.9, UFPS(main_teacher=MainTeacher("global"))) == "the global model's"


def test_agreement_of_a_run(made: Mapping[str, Path], tmp_path: Path) -> None:
    files = analyse([made["ufps"], made["pl"]], ["agreement"], tmp_path)  # FedAvg* has no main teacher: none of it
    name = f"agreement-{made['ufps'].name}"
    assert {path.name for path in files} == {f"{name}.{kind}" for kind in ("svg", "png", "md", "json")}
    facts = facts_of(tmp_path, name)
    assert {site: one["case"] for site, one in facts["sites"].items()} == {"ada": "ada0", "bea": "bea0", "cid": "cid0"}
    assert all(set(one["organs"]) == {"round", "square"} for one in facts["sites"].values())
    with pytest.raises(RunError, match="no global main teacher"):
        analyse([made["pl"]], ["agreement"], tmp_path)


# ------------------------------------------------------------------------------------ labels by round


def test_the_best_so_far_never_falls() -> None:
    nan = float("nan")
    curve = Curve((1, 2, 3, 4), (nan, 0.4, 0.3, 0.6), {"ada": (0.2, nan, 0.1, 0.5)})
    found = label_curves.so_far({"valid": {"cup": curve}})["valid"]["cup"]
    assert found.rounds == curve.rounds
    assert found.site_mean[1:] == (0.4, 0.4, 0.6) and found.site_mean[0] != found.site_mean[0]
    assert found.sites == {"ada": (0.2, 0.2, 0.2, 0.5)}


def test_label_curves_are_the_means_of_the_scores(made: Mapping[str, Path]) -> None:
    view = read_run(made["pl"])
    found = label_curves.curves_of(view)
    assert list(found) == ["valid", "test"] and list(found["test"]) == ["round", "square"]
    curve = found["test"]["square"]
    assert curve.rounds == (1, 2) and list(curve.sites) == ["ada", "bea", "cid"]  # complete test masks
    rows = [r for r in view.rows if (r.round, r.phase, r.split, r.label) == (2, "train", "test", "square")]
    values = {row.site: row.value for row in rows if row.metric == "dice"}  # one test case each
    assert curve.site_mean[-1] == pytest.approx(sum(values.values()) / 3)
    assert list(found["valid"]["square"].sites) == ["bea", "cid"]  # those that annotate it
    drawn = label_curves.draw({"one": found, "two": found}, ["round", "square"], "Dice")
    assert [len(axes.lines) for axes in drawn.axes] == [2, 2, 2, 2]
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["round", "square", "", ""]
    assert list(drawn.axes[3].lines[0].get_ydata()) == list(curve.site_mean)


def test_one_label_is_what_progress_shows(finished: Mapping[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has one label only"):
        analyse([finished["guest"]], ["labels"], tmp_path)


# ------------------------------------------------------------------------------------ ablation


def test_standings_put_seeds_together(made: Mapping[str, Path]) -> None:
    views = [read_run(made[name]) for name in ("ufps", "pl", "pl-1")]
    found = ablation.standings(views)
    assert set(found) == {"UFPS", "FedAvg*"}
    means = [view.summary["headline"]["site_mean"] for view in views if view.summary]
    assert found["UFPS"].mean.value == pytest.approx(means[0]) and found["UFPS"].mean.sd is None
    assert found["FedAvg*"].mean.value == pytest.approx((means[1] + means[2]) / 2)
    assert found["FedAvg*"].mean.sd == pytest.approx(abs(means[1] - means[2]) / math.sqrt(2))
    assert list(found["UFPS"].labels) == ["round", "square"]
    axes = ablation.axes_of(found)  # two labels are no figure: the sites are its axes
    assert {name: list(by) for name, by in axes.items()} == {name: ["ada", "bea", "cid"] for name in found}
    bars = ablation.bars(found, "Dice").axes[0]
    assert [patch.get_width() for patch in bars.patches] == [one.mean.value for one in found.values()]
    low, high = bars.get_xlim()
    assert low < min(means) and max(means) < high and high - low >= ablation.LEAST_ROOM  # ± seeds is in view
    line = ablation.radar(axes, "Dice").axes[0].lines[0]
    values = list(next(iter(axes.values())).values())
    assert list(line.get_ydata()) == [*values, values[0]]  # closed
    lost = ablation.radar({"UFPS": {"liver": 0.8, "kidney": 0.4, "spleen": 0.0}}, "Dice").axes[0]
    assert lost.get_ylim()[0] == 0.0  # there is no Dice below nothing
    with pytest.raises(RunError, match="at least two"):
        ablation.standings(views[1:])


@pytest.mark.slow
def test_several_runs_get_them_unasked_and_the_report_shows_them(made: Mapping[str, Path], tmp_path: Path) -> None:
    runs = Runs([made["ufps"], made["pl"]])
    assert ANALYSES["labels"].suits(runs) and ANALYSES["ablation"].suits(runs)
    assert not ANALYSES["ablation"].suits(Runs([made["pl"], made["pl-1"]]))
    shutil.copytree(made["ufps"], tmp_path / "ufps")
    files = analyse([tmp_path / "ufps", made["pl"]], ["labels", "ablation"])
    assert {path.stem for path in files} == {"labels", "labels-so-far", "ablation", "radar"}
    shown = findings(groups([read_run(tmp_path / "ufps"), read_run(made["pl"])]))
    assert {one.title for one in shown} == {"Label by label, round by round", "Row by row"}
    assert all(one.pictures for one in shown)


def test_masks_without_the_hidden_organs_are_no_truth(tmp_path: Path) -> None:
    """Files of a real hospital hold only what it drew."""
    from PIL import Image

    folder = write_organs(tmp_path / "real")
    for site, value in (("ada", 1), ("bea", 2)):
        for path in (folder / site / "labels").glob("*.png"):
            with Image.open(path) as image:
                mask = image.point(lambda v, keep=value: v if v == keep else 0)
            mask.save(path)
    study = toy_study(folder, "fedavg-pl", study__rounds=1, method__teachers__rounds=1)
    with pytest.raises(RunError, match="nobody knows how good the other labels are"):
        analyse([run(study, tmp_path / "runs", workers=0).folder], ["pseudo-labels"], tmp_path / "to")
