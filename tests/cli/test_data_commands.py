"""phantom and check, as a newcomer uses them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from consilium.data.case_table import read_table
from tests.cli.terminal import call, refused
from tests.raw_trees import save_picture, some

SITES = ("binrushed", "drishti", "magrabia", "messidor", "refuge", "rimone")


@pytest.fixture
def broken(federation: Path, tmp_path: Path) -> Path:
    """The toy federation with a fault of each kind: a cut image, a missing mask, a strange value, a wrong size."""
    folder = tmp_path / "broken"
    shutil.copytree(federation, folder)
    image = folder / "ada/images/ada001.png"
    image.write_bytes(image.read_bytes()[:50])
    (folder / "bea/labels/bea002.png").unlink()
    Image.fromarray(np.full((16, 16), 255, np.uint8)).save(folder / "cid/labels/cid003.png")
    Image.fromarray(np.full((10, 16), 1, np.uint8)).save(folder / "cid/labels/cid004.png")
    return folder


FAULTS = {"ada001": "cannot be read", "bea002": "does not exist", "cid003": "255", "cid004": "10×16"}


def test_phantom_writes_sites_and_prints_the_folder(tmp_path: Path) -> None:
    done = call("phantom", "retina", "--to", tmp_path / "eyes", "--cases", 18, "--size", 16)
    assert (done.status, done.out) == (0, f"{tmp_path / 'eyes'}\n")
    assert done.err.splitlines() == [f"{site}: 1 train, 1 valid, 1 test" for site in SITES]
    assert call("check", tmp_path / "eyes").status == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["brain"], ["there is no phantom 'brain'", "retina"]),
        (["retina", "--cases", "3"], ["18 or more"]),
        (["retina", "--size", "3"], ["16 to 1024"]),
    ],
)
def test_phantom_refuses(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    refused(call("phantom", *arguments, "--to", tmp_path / "new"), *words)
    assert not (tmp_path / "new").exists()


def test_phantom_refuses_a_folder_in_use(tmp_path: Path) -> None:
    (tmp_path / "thesis.doc").touch()
    refused(call("phantom", "retina", "--to", tmp_path), "not empty")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.doc"]


def test_check_of_a_sound_federation(federation: Path) -> None:
    done = call("check", federation)
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines() == [
        "ada: 8 train, 3 valid, 3 test",
        "bea: 12 train, 3 valid, 3 test",
        "cid: 10 train, 3 valid, 3 test",
        f"{federation} is sound.",
    ]


def test_check_names_every_fault(broken: Path) -> None:
    done = call("check", broken)
    assert done.status == 2
    for case, word in FAULTS.items():
        (line,) = [line for line in done.out.splitlines() if f"case '{case}'" in line]
        assert line.startswith("fault: ") and word in line
    assert done.err == f"consilium: {broken} has 4 faults; correct them before training.\n"


def test_check_as_json(broken: Path, federation: Path) -> None:
    done = call("check", broken, "--json")
    assert done.status == 2
    assert {fault["case"] for fault in done.document["faults"]} == set(FAULTS)
    sound = call("check", federation, "--json")
    assert sound.status == 0
    assert sound.document["faults"] == []
    assert sound.document["counts"]["ada"] == {"train": 8, "valid": 3, "test": 3, "empty": 0}


def test_fix_leaves_out_what_is_broken_and_touches_nothing(broken: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in broken.rglob("*") if path.is_file()}
    done = call("check", broken, "--fix", "--to", tmp_path / "mended")
    assert done.status == 0
    assert done.err.count("left out: ") == 4
    assert "ada: 7 train" in done.out and "cid: 8 train" in done.out
    assert call("check", tmp_path / "mended").status == 0
    assert {path: path.read_bytes() for path in broken.rglob("*") if path.is_file()} == before


def test_fix_and_to_go_together(broken: Path, tmp_path: Path) -> None:
    refused(call("check", broken, "--fix"), "--to")
    refused(call("check", broken, "--to", tmp_path / "new"), "--fix")
    refused(call("check", broken, "--fix", "--to", broken / "inside"), "inside each other")


def test_check_writes_a_page_and_counts(broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consilium.reports.check_figures.CASES", 2)
    shutil.copy(broken / "ada/images/ada002.png", broken / "bea/images/bea003.png")
    page, counts = tmp_path / "new/check.html", tmp_path / "counts.json"
    done = call("check", broken, "--page", page, "--counts", counts)
    assert done.status == 2
    text = page.read_text()
    assert "http:" not in text and "https:" not in text and text.count("<img") >= 5
    for word in (*FAULTS, "The sites side by side", "255"):
        assert word in text
    assert text.count("<details") == len(set(re.findall(r"<summary>.*</summary>", text)))  # a kind has one place
    assert json.loads(counts.read_text())["cases"]["ada"]["train"] == 8


def test_a_leak_between_training_and_test_is_an_error(federation: Path, tmp_path: Path) -> None:
    folder = tmp_path / "leak"
    shutil.copytree(federation, folder)
    rows = {row["case"]: row for row in read_table(folder / "ada/cases.csv").rows}
    trained = next(row for row in rows.values() if row["split"] == "train")
    tested = next(row for row in rows.values() if row["split"] == "test")
    shutil.copy(folder / "ada" / tested["image"], folder / "ada" / trained["image"])
    done = call("check", folder)
    assert done.status == 2
    assert done.err == f"consilium: {folder} has 1 error that makes scores false.\n"
    (line,) = [line for line in done.out.splitlines() if line.startswith("error: ")]
    assert f"ada/{trained['image']}" in line and "trained on" in line
    mended = call("check", folder, "--fix", "--to", tmp_path / "mended")
    assert mended.status == 0 and "ada: 7 train" in mended.out


def test_a_hospital_checks_its_own_site(federation: Path, study: Path) -> None:
    done = call("check", federation / "bea", "--study", study, "--json")
    assert done.status == 0, done.err
    assert list(done.document["counts"]) == ["bea"]


def test_split_draws_once_and_by_patient(federation: Path, tmp_path: Path) -> None:
    folder = tmp_path / "unsplit"
    shutil.copytree(federation, folder)
    for table in folder.glob("*/cases.csv"):
        table.write_text(re.sub(",(train|valid|test),", ",,", table.read_text()))
    assert "ada: 14 not yet split" in call("check", folder).out
    drawn = call("check", folder, "--split", "0.5,0.25,0.25", "--seed", 3)
    assert drawn.out.splitlines()[0] == "ada: 7 train, 4 valid, 3 test"
    tables = [table.read_bytes() for table in sorted(folder.glob("*/cases.csv"))]
    assert call("check", folder, "--split", "0.8,0.1,0.1", "--seed", 4).out == drawn.out
    assert [table.read_bytes() for table in sorted(folder.glob("*/cases.csv"))] == tables


@pytest.mark.parametrize("shares", ["0.5,0.25", "a,b,c", "0.5,0.25,0.5", ""])
def test_split_refuses_shares(shares: str, federation: Path) -> None:
    refused(call("check", federation, "--split", shares), "0.5,0.25,0.25")


def test_check_of_nothing(tmp_path: Path) -> None:
    done = call("check", tmp_path / "nowhere")
    assert done.status == 2
    assert "is not a folder" in done.out
    assert "Traceback" not in done.err


def test_a_broken_case_stops_a_run_before_training(broken: Path, tmp_path: Path, study: Path) -> None:
    (broken / "bea/labels/bea002.png").write_bytes((broken / "bea/labels/bea001.png").read_bytes())
    done = call("run", study, "--set", f'data.federation="{broken}"', "--runs", tmp_path / "runs", "--workers", 0)
    refused(done, "cannot be read", "255", "10×16", "ada001", "cid003", "cid004")
    assert not list(tmp_path.glob("runs/*/journal.jsonl"))


def test_a_run_lists_all_faults_of_tables_and_images(broken: Path, tmp_path: Path, study: Path) -> None:
    done = call("run", study, "--set", f'data.federation="{broken}"', "--runs", tmp_path / "runs", "--workers", 0)
    refused(done, *FAULTS, *FAULTS.values())
    assert not list(tmp_path.glob("runs/*/journal.jsonl"))


def test_digits_are_cut_trained_and_predicted(tmp_path: Path) -> None:
    """From one site of digits to a federation, its table and figure, and a run of FedAvg on it."""
    done = call("phantom", "digits", "--to", tmp_path / "one", "--cases", 300, "--size", 16, "--sites", 1)
    assert (done.status, done.err) == (0, "digits: 219 train, 38 valid, 43 test; all classes\n")
    done = call("partition", tmp_path / "one", "--to", tmp_path / "cut", "--scheme", "pathological", "--sites", 4)
    assert (done.status, done.out) == (0, f"{tmp_path / 'cut'}\n")
    lines = done.err.splitlines()
    assert [line[:6] for line in lines[:4]] == ["site1:", "site2:", "site3:", "site4:"]
    assert len([line for line in lines if line.startswith("no site holds the class")]) == 2  # 4 times 2 of 10
    names = {path.name for path in (tmp_path / "cut").iterdir()}
    assert names == {"federation.toml", "partition.csv", "partition.png", "site1", "site2", "site3", "site4"}
    assert call("check", tmp_path / "cut").status == 0

    study = tmp_path / "study.toml"
    study.write_text(
        f'[study]\nrounds = 1\n[data]\nfederation = "{tmp_path / "cut"}"\n[task]\nnetwork = "cnn"\nwidths = [4, 8]\n'
        'hidden = 16\n[preprocess]\nsize = [20, 20]\n[method]\nname = "fedavg"\n'
    )
    run = call("run", study, "--workers", 0, "--runs", tmp_path / "runs")
    assert run.status == 0, run.err
    seen = call("predict", run.folder, tmp_path / "cut/site2/images/digits.npy#3", "--to", tmp_path / "p", "--json")
    assert seen.status == 0, seen.err
    (prediction,) = seen.document["predictions"]
    assert prediction["prediction"] in "0123456789"


def test_import_writes_a_site_and_prints_the_folder(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 6, 6), dtype=np.uint8)
    np.savez(tmp_path / "m.npz", images=images, labels=np.arange(20) % 2, classes=np.array(["hand", "head"]))
    done = call("import", "mednist", tmp_path / "m.npz", "--to", tmp_path / "to", "--site", "city", "--seed", 3)
    assert (done.status, done.out) == (0, f"{tmp_path / 'to'}\n")
    assert done.err == "city: 14 train, 2 valid, 4 test; all classes\n"
    assert call("check", tmp_path / "to").status == 0


def test_import_of_a_folder_says_what_it_paired_and_left_out(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b", "c")):
        save_picture(tmp_path / f"raw/i/{name}.png", some(32, 32, seed=seed))
        save_picture(tmp_path / f"raw/m/{name}.png", np.eye(32) * 255)
    save_picture(tmp_path / "raw/i/d.png", some(32, 32))
    words = ["--images", "i/{case}.png", "--masks", "m/{case}.png", "--labels", "x", "--values", "255=x"]
    command = ["import", "folder", tmp_path / "raw", "--to", tmp_path / "to", *words]
    refused(
        call(*command),
        "One doubt, so nothing was written",
        "add --yes to import the 3 other cases, as far as they can be read",
        "d.png",
    )
    done = call(*command, "--yes")
    assert (done.status, done.out) == (0, f"{tmp_path / 'to'}\n")
    assert done.err.splitlines() == [
        "site1: paired 3 images with their masks, such as i/a.png with m/a.png",
        f"left out: {tmp_path / 'raw/i/d.png'}: no mask fits it.",
        "site1: 1 train, 1 valid, 1 test",
    ]
    assert call("check", tmp_path / "to").status == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["import", "mnist", "nowhere"], ["there is no nowhere"]),
        (["import", "mnist", "nowhere", "--crop", "disc"], ["--crop and --reference do not go with `import mnist`"]),
        (["import", "mnist", "nowhere", "--labels", "a"], ["--labels does not go with `import mnist`"]),
        (["import", "drishti", "nowhere", "--images", "a"], ["--images does not go with `import drishti`"]),
        (["import", "drishti", "--drishti", "nowhere"], ["give the folder after the name"]),
        (["import", "folder"], ["needs the files of the dataset"]),
        (["import", "fedsm-retina", "nowhere"], ["takes its sources by name; write --drishti nowhere"]),
        (["import", "imagenet", "nowhere"], ["there is no importer 'imagenet'", "mnist, cifar10, medmnist, mednist"]),
        (["partition", "nowhere", "--scheme", "practical"], ["nowhere is not a folder"]),
        (["partition", "nowhere", "--scheme", "random"], ["there is no scheme 'random'", "pathological"]),
        (["phantom", "retina", "--sites", "3"], ["--sites is for digits"]),
        (["phantom", "retina", "--unlabelled", "3"], ["drawn of the abdomen only"]),
    ],
)
def test_import_and_partition_refuse(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    refused(call(*arguments, "--to", tmp_path / "new"), *words)
    assert list(tmp_path.iterdir()) == []
