"""evaluate, predict's extras and compare's formats, as they are used."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from consilium.data.phantoms import write_phantom
from consilium.evaluation import Evaluation, ScoredCase, averaged
from consilium.finished_run import open_run
from consilium.policy import alias_of
from consilium.reports.evaluation_page import score_grids, show_evaluation
from consilium.scores.classes import class_report
from consilium.scores.statistics import interval
from consilium.task import CaseScore
from consilium.test_time import Mirrored
from tests.cli.terminal import call, refused
from tests.toy import toy_study

Finished = Callable[[str], Path]
TEACHERS = {"fedavg-pl": {"method__teachers__rounds": 1}}
SEEN = (("bea", 0.2), ("cid", 0.4))  # sites, and the Dice of their only case


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A federation of digits, and a finished run of a classification on it."""
    place = tmp_path_factory.mktemp("digits")
    write_phantom("digits", place / "fed", 120, 16, 0, 2)
    study = place / "study.toml"
    study.write_text(
        f'[study]\nrounds = 1\n[data]\nfederation = "{place / "fed"}"\n[task]\nnetwork = "cnn"\nwidths = [4, 8]\n'
        'hidden = 8\n[method]\nname = "fedavg"\n'
    )
    done = call("run", study, "--workers", 0, "--runs", place / "runs", "--json")
    assert done.status == 0, done.err
    return place / "fed", Path(done.document["run"])


def swapped(federation: Path, to: Path) -> tuple[Path, list[str]]:
    """A copy whose site bea has its training cases for testing and its test cases for training; those first ones."""
    copy = shutil.copytree(federation, to)
    table = copy / "bea" / "cases.csv"
    swap = {",train,": ",test,", ",test,": ",train,"}
    lines = [
        next((line.replace(*pair) for pair in swap.items() if pair[0] in line), line)
        for line in table.read_text().splitlines(True)
    ]
    table.write_text("".join(lines))
    return copy, sorted(f"bea/{line.partition(',')[0]}" for line in lines if ",test," in line)


def test_cases_that_trained_the_model_are_named(finished: Finished, federation: Path, tmp_path: Path) -> None:
    leaky, trained = swapped(federation, tmp_path / "leaky")
    shutil.rmtree(leaky / "ada")
    done = call("evaluate", finished("fedavg"), leaky, "--json", "--page", tmp_path / "scores.html")
    assert done.status == 0 and done.document["seen_in_training"] == trained
    assert f"trained on, or chosen by, {len(trained)} of" in done.err
    assert "their scores are too good" in (tmp_path / "scores.html").read_text()
    clean = call("evaluate", finished("fedavg"), federation, "--json")
    assert (clean.document["seen_in_training"], clean.document["changed_since_training"]) == ([], [])
    assert clean.err == ""


def test_the_own_training_cases_are_named_too(finished: Finished, federation: Path) -> None:
    done = call("evaluate", finished("fedavg"), federation, "--split", "all", "--json")
    rows = {(row["site"], row["case"]) for row in done.document["cases"]}
    tests = call("evaluate", finished("fedavg"), federation, "--json").document["cases"]
    seen = rows - {(row["site"], row["case"]) for row in tests}
    assert done.document["seen_in_training"] == sorted("/".join(one) for one in seen) and len(seen) > 10


def test_a_model_of_one_site_has_not_seen_the_others_cases(finished: Finished, federation: Path) -> None:
    done = call("evaluate", finished("local"), federation, "--split", "train", "--site", "bea", "--json")
    assert {name.partition("/")[0] for name in done.document["seen_in_training"]} == {"bea"}


def test_a_site_whose_table_has_changed_since_is_named(finished: Finished, federation: Path, tmp_path: Path) -> None:
    """What the model was trained on there can no longer be told."""
    moved, _ = swapped(federation, tmp_path / "moved")
    run = shutil.copytree(finished("fedavg"), tmp_path / "run")
    text = (run / "study.toml").read_text()
    (run / "study.toml").write_text(text.replace(str(federation), str(moved)))
    for split in ("train", "test"):
        done = call("evaluate", run, moved, "--split", split, "--json")
        assert done.document["changed_since_training"] == ["bea"]
        assert not any(name.startswith("bea/") for name in done.document["seen_in_training"])
        assert "table of bea is not as in the training" in done.err


@pytest.mark.parametrize(("method", "used"), [("fedavg", False), ("fedavg-pl", True)])
def test_a_case_without_a_mask_was_seen_only_by_methods_that_use_it(
    method: str, used: bool, organs: Path, tmp_path: Path
) -> None:
    """Another federation has its mask, which was drawn later."""
    bare = shutil.copytree(organs, tmp_path / "bare")
    table = bare / "ada/cases.csv"
    found = re.search(r"(?m)^(.*?),.*,train,.*,(labels/.*)$", table.read_text())
    assert found is not None
    table.write_text(table.read_text().replace(found[2], ""))
    study = tmp_path / "study.toml"
    study.write_text(toy_study(bare, method, study__rounds=1, **TEACHERS.get(method, {})).to_toml())
    run = call("run", study, "--workers", 0, "--runs", tmp_path / "runs", "--json").document["run"]
    done = call("evaluate", run, organs, "--split", "train", "--json")
    scored = {f"{row['site']}/{row['case']}" for row in done.document["cases"]}
    assert scored - set(done.document["seen_in_training"]) == (set() if used else {f"ada/{found[1]}"})


def test_pooled_training_has_seen_the_cases_of_all_sites(finished: Finished, federation: Path) -> None:
    done = call("evaluate", finished("pooled"), federation, "--split", "train", "--json")
    assert {name.partition("/")[0] for name in done.document["seen_in_training"]} == {"ada", "bea", "cid"}
    assert len(done.document["seen_in_training"]) == len({(r["site"], r["case"]) for r in done.document["cases"]})
    tests = call("evaluate", finished("pooled"), federation, "--json")
    assert (tests.document["seen_in_training"], tests.err) == ([], "")


def test_a_site_under_rules_tells_its_table_by_another_name(federation: Path, tmp_path: Path) -> None:
    """It is not called another table."""
    (tmp_path / "hospital.toml").write_text('site = "bea"\ndata = "d"\nmemory = "m"\nlabels = ["blob"]\n')
    study = tmp_path / "study.toml"
    study.write_text(toy_study(federation, "fedavg", study__rounds=1).to_toml())
    rules = ("--policy", tmp_path / "hospital.toml")
    run = call("run", study, "--workers", 0, "--runs", tmp_path / "runs", *rules, "--json").document["run"]
    done = call("evaluate", run, federation, "--split", "train", "--json")
    assert done.document["changed_since_training"] == []
    assert any(name.startswith("bea/") for name in done.document["seen_in_training"])


def test_of_a_hospital_only_the_number_of_cases_is_known(finished: Finished, federation: Path, tmp_path: Path) -> None:
    """A federation's sites hash their tables with keys that nobody else has."""
    run = shutil.copytree(finished("fedavg"), tmp_path / "run", ignore=shutil.ignore_patterns("sites"))
    origin = json.loads((run / "origin.json").read_text())
    for name, facts in origin["sites"].items():
        facts.update({key: alias_of(facts[key], f"secret of {name}".encode()) for key in ("table", "arrays", "key")})
    origin["sites"]["cid"]["cases"] += 1
    (run / "origin.json").write_text(json.dumps(origin))
    done = call("evaluate", run, federation, "--split", "train", "--json")
    assert done.document["changed_since_training"] == ["cid"]
    assert {name.partition("/")[0] for name in done.document["seen_in_training"]} == {"ada", "bea"}


def test_rows_in_python_say_what_the_model_has_seen(finished: Finished, federation: Path) -> None:
    run = open_run(finished("fedavg"))
    assert {row["seen"] for row in run.evaluate(split="test")} == {False}
    assert {row["seen"] for row in run.evaluate(federation, split="train")} == {True}


def test_new_cases_are_scored_with_intervals_and_a_page(finished: Finished, federation: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    shutil.copytree(federation, new)
    shutil.rmtree(new / "ada")
    done = call("evaluate", finished("fedavg"), new, "--json", "--page", tmp_path / "scores.html")
    assert done.status == 0, done.err
    (dice,) = [score for score in done.document["scores"] if (score["metric"], score["label"]) == ("dice", "blob")]
    assert set(dice["sites"]) == {"bea", "cid"}
    told = {
        (row["site"], row["case"]): row["value"]
        for row in open_run(finished("fedavg")).scores(split="test", phase="best", metric="dice", label="blob")
    }
    bea = [value for (site, _), value in told.items() if site == "bea"]
    assert dice["sites"]["bea"]["mean"] == pytest.approx(np.mean(bea))
    assert dice["sites"]["bea"]["low"] <= np.mean(bea) <= dice["sites"]["bea"]["high"]
    assert dice["site_mean"]["mean"] == pytest.approx(np.mean([s["mean"] for s in dice["sites"].values()]))
    page = (tmp_path / "scores.html").read_text()
    assert "The cases with the worst Dice" in page and "bea" in page and "ada" not in page


def test_a_page_that_is_a_folder_is_refused_before_anything_is_scored(
    finished: Finished, federation: Path, tmp_path: Path
) -> None:
    refused(call("evaluate", finished("fedavg"), federation, "--page", tmp_path), "is a folder; name a file")


def test_one_case_has_no_interval() -> None:
    """Of one case at each of two sites only their mean has a spread; it says how far the two lie apart."""
    cases = [ScoredCase(site, "1", "global", (CaseScore("blob", "dice", value),)) for site, value in SEEN]
    (dice,) = averaged(cases)
    (grid,) = score_grids(Evaluation("new", "test", tuple(cases), (dice,), {}))
    assert [cell.text for cell in grid[1]][2:4] == ["0.2000", "0.4000"]
    assert dice.to_json()["sites"]["bea"]["low"] is None
    assert dice.site_mean.low is not None and dice.site_mean.low < 0.3


def test_many_sites_have_a_row_each(capsys: pytest.CaptureFixture[str]) -> None:
    """Twelve columns with intervals do not fit into 160; broken numbers would be other numbers."""
    names = [f"site{i:02d}" for i in range(1, 13)]
    cases = [ScoredCase(name, f"{i}", "global", (CaseScore("blob", "dice", i / 8),)) for name in names for i in (1, 6)]
    show_evaluation(Evaluation("new", "test", tuple(cases), tuple(averaged(cases)), {}))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(i for i, row in enumerate(rows) if row[:2] == ["site", "mean"]) < rows.index(
        next(row for row in rows if row and row[0] == "site01")
    )
    assert [row for row in rows if row and row[0] in names] == [
        [name, "0.4375", "(0.125", "–", "0.750)"] for name in names
    ]


def test_all_cases_of_one_site_have_one_interval_of_accuracy() -> None:
    truth, right = [0, 0, 0, 1, 1, 1], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    chances = np.array([[0.9, 0.1] if (t == 0) == bool(r) else [0.1, 0.9] for t, r in zip(truth, right)])
    assert class_report(truth, chances, ["a", "b"]).accuracy_interval == interval({"site": right})


def test_every_labelled_case_can_be_scored(finished: Finished, federation: Path) -> None:
    done = call("evaluate", finished("fedavg"), federation, "--split", "all", "--json")
    assert len({(row["site"], row["case"]) for row in done.document["cases"]}) == 14 + 18 + 16
    refused(call("evaluate", finished("fedavg"), federation, "--split", "tests"), "train, valid, test, all")


def test_classes_are_measured(digits: tuple[Path, Path], tmp_path: Path) -> None:
    federation, run = digits
    done = call("evaluate", run, federation, "--json", "--page", tmp_path / "scores.html")
    assert done.status == 0, done.err
    report = done.document["classes"]["all"]
    assert len(report["confusion"]) == 10 and sum(map(sum, report["confusion"])) == report["cases"]
    assert 0 <= report["ece"] <= 1
    right = sum(report["confusion"][i][i] for i in range(10))
    assert report["accuracy"] == pytest.approx(right / report["cases"])
    page = (tmp_path / "scores.html").read_text()
    assert "Confusion" in page and "expected calibration error" in page
    shown = call("evaluate", run, federation)
    assert "sensitivity" in shown.out and "Confusion" in shown.out


def test_a_federation_of_other_labels_is_refused(finished: Finished, organs: Path) -> None:
    refused(call("evaluate", finished("fedavg"), organs), "labels = ['round', 'square']", "trained with ['blob']")


def test_pictures_of_one_name_have_a_class_each(digits: tuple[Path, Path], tmp_path: Path) -> None:
    """Nothing is written beside the table, so no file can replace another."""
    picture = np.load(digits[0] / "site01/images/digits.npy")[0]
    for place in ("a/left/1.png", "b/left/1.png"):
        (tmp_path / place).parent.mkdir(parents=True)
        Image.fromarray(picture).save(tmp_path / place)
    done = call("predict", digits[1], tmp_path / "a", tmp_path / "b", "--to", tmp_path / "out", "--json")
    assert [one["image"][-12:] for one in done.document["predictions"]] == ["a/left/1.png", "b/left/1.png"]


def test_class_probabilities_and_thresholds(digits: tuple[Path, Path], tmp_path: Path) -> None:
    federation, run = digits
    image = f"{federation / 'site01/images/digits.npy'}#0"
    plain = call("predict", run, image, "--to", tmp_path / "a", "--json").document["predictions"][0]
    chances = {key.removeprefix("probability:"): p for key, p in plain.items() if key.startswith("probability:")}
    assert len(chances) == 10 and sum(chances.values()) == pytest.approx(1, abs=1e-5)
    assert plain["probability"] == chances[plain["prediction"]] == max(chances.values())
    least = min(chances, key=lambda label: chances[label])
    asked = ("predict", run, image, "--to", tmp_path / "b", "--json", "--threshold")
    assert call(*asked, f"{least}={chances[least] / 2}").document["predictions"][0]["prediction"] == least
    top = plain["prediction"]
    assert call(*asked, f"{top}=0.999").document["predictions"][0]["prediction"] != top
    refused(call(*asked, "eleven=0.5"), "there is no class 'eleven'")
    refused(call(*asked, "0"), "CLASS=PROBABILITY")
    refused(call("predict", run, image, "--to", tmp_path / "c", "--overlays"), "are for masks")


def test_probability_maps_and_overlays(finished: Finished, federation: Path, tmp_path: Path) -> None:
    image = federation / "bea/images/bea001.png"
    done = call("predict", finished("fedavg"), image, "--to", tmp_path, "--probabilities", "--overlays")
    assert done.status == 0, done.err
    chances = np.load(tmp_path / "bea001-probabilities.npy")
    mask = np.asarray(Image.open(tmp_path / "bea001.png"))
    assert chances.shape == (1, *mask.shape)
    assert np.array_equal(mask == 1, chances[0] > 0.5)
    assert np.asarray(Image.open(tmp_path / "bea001-overlay.png")).shape[0] > 100


def test_mirror_images_are_averaged(finished: Finished, federation: Path) -> None:
    run = open_run(finished("fedavg"))
    task = run.study.task.on("cpu")
    images = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    mirrored = Mirrored(task, run.predictor())
    one = mirrored.answer(images).output.softmax(1)
    turned = mirrored.answer(images.flip(3)).output.softmax(1).flip(3)
    torch.testing.assert_close(one, turned, rtol=1e-4, atol=1e-5)  # the mirror image has the mirrored answer
    assert not torch.allclose(one, run.predictor().answer(images).output.softmax(1), atol=1e-4)
    assert call("evaluate", run.path, federation, "--mirrored", "--json").status == 0


def test_compare_another_score_in_other_formats(finished: Finished) -> None:
    runs = (finished("fedavg"), finished("fedsm"))
    shown = call("compare", *runs, "--metric", "jaccard")
    assert shown.status == 0, shown.err
    assert "Test Jaccard" in shown.out and "Paired differences" in shown.out
    lines = list(csv.reader(call("compare", *runs, "--format", "csv").out.splitlines()))
    assert lines[0][0] == "method" and len(lines) >= 3
    gap = next(line for line in lines if line and line[0] == "FedSM" and line[1].startswith(("+", "-")))
    means = {
        line[0]: float(line[lines[0].index("site mean")])
        for line in lines[1:4]
        if line and line[0] in ("FedSM", "FedAvg")
    }
    assert float(gap[1]) == pytest.approx(means["FedSM"] - means["FedAvg"], abs=2e-4)
    assert (
        call("compare", *runs, "--format", "md").out.count("|---")
        + call("compare", *runs, "--format", "md").out.count("| ---")
        >= 2
    )
    latex = call("compare", *runs, "--format", "latex").out
    assert latex.count("\\begin{tabular}") == 2 and "95 \\% interval" in latex
    refused(call("compare", *runs, "--metric", "dicee"), "no score 'dicee'", "dice")
    refused(call("compare", *runs, "--format", "word"), "md, latex, csv")
