"""predict: images of any size in, masks in their own geometry out."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from consilium import prediction
from tests.cli.terminal import call, refused

Finished = Callable[[str], Path]
CHANCES = ["chance:ada", "chance:bea", "chance:cid"]


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def grey(tmp_path: Path) -> Path:
    """A picture of another size than the training images."""
    path = tmp_path / "in/odd.png"
    path.parent.mkdir()
    Image.fromarray((np.arange(37 * 23).reshape(37, 23) % 251).astype(np.uint8)).save(path)
    return path


def test_a_file_and_a_folder(finished: Finished, federation: Path, grey: Path, tmp_path: Path) -> None:
    done = call("predict", finished("fedsm"), grey, federation / "bea/images", "--to", tmp_path / "out")
    assert (done.status, done.out) == (0, f"{tmp_path / 'out/predictions.csv'}\n")
    rows = table(tmp_path / "out")
    assert len(rows) == 1 + 18
    assert list(rows[0]) == ["image", "prediction", "model", "confidence", "why", "warning", *CHANCES]
    for row in rows:
        mask = np.asarray(Image.open(row["prediction"]))
        assert mask.shape == np.asarray(Image.open(row["image"])).shape
        assert set(np.unique(mask)) <= {0, 1}
        assert row["model"] == "global" or row["model"].startswith("personal/")
        assert sum(float(row[chance]) for chance in CHANCES) == pytest.approx(1, abs=1e-5)
        assert float(row["confidence"]) == max(float(row[chance]) for chance in CHANCES)


def test_as_json(finished: Finished, grey: Path, tmp_path: Path) -> None:
    done = call("predict", finished("fedsm"), grey, "--to", tmp_path / "out", "--json")
    assert (done.status, done.err) == (0, "")
    (one,) = done.document["predictions"]
    assert (one["image"], one["prediction"]) == (str(grey), str(tmp_path / "out/odd.png"))
    with (tmp_path / "out/predictions.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert list(row) == list(one)
    assert {f"chance:{site}" for site in ("ada", "bea", "cid")} <= one.keys()
    assert {key: f"{value:.6f}" if isinstance(value, float) else value for key, value in one.items()} == row


def test_a_hospitals_own_model(finished: Finished, grey: Path, tmp_path: Path) -> None:
    for method, model in (("fedsm", "personal/bea"), ("local", "local/bea")):
        call("predict", finished(method), grey, "--to", tmp_path / method, "--site", "bea")
        assert [row["model"] for row in table(tmp_path / method)] == [model]


@pytest.mark.parametrize(
    ("method", "site", "words"),
    [
        ("fedsm", ["--site", "zed"], ["'zed'", "ada, bea, cid"]),
        ("fedavg", ["--site", "ada"], ["'ada'", "--site"]),
        ("local", [], ["--site"]),
    ],
)
def test_models_that_do_not_exist(
    method: str, site: list[str], words: list[str], finished: Finished, grey: Path, tmp_path: Path
) -> None:
    refused(call("predict", finished(method), grey, "--to", tmp_path / "out", *site), *words)


def test_nifti_keeps_its_affine(finished: Finished, tmp_path: Path) -> None:
    affine = np.array([[0, -0.5, 0, 3], [0.7, 0, 0, -2], [0, 0, 2, 9], [0, 0, 0, 1.0]])
    picture = (np.arange(19 * 21) % 200).astype(np.int16).reshape(19, 21)
    nibabel.save(nibabel.Nifti1Image(picture, affine), tmp_path / "a.nii.gz")
    call("predict", finished("fedavg"), tmp_path / "a.nii.gz", "--to", tmp_path / "out")
    mask = nibabel.load(tmp_path / "out/a.nii.gz")
    assert mask.shape == (19, 21)
    np.testing.assert_allclose(mask.affine, affine, atol=1e-6)
    assert set(np.unique(np.asarray(mask.dataobj))) <= {0, 1}


def test_images_of_one_name_in_two_folders(finished: Finished, grey: Path, tmp_path: Path) -> None:
    twin = tmp_path / "other/odd.png"
    twin.parent.mkdir()
    shutil.copy(grey, twin)
    call("predict", finished("fedavg"), grey, twin, "--to", tmp_path / "out")
    assert [Path(row["prediction"]).name for row in table(tmp_path / "out")] == ["in_odd.png", "other_odd.png"]


def test_masks_that_are_no_predictions_are_never_replaced(finished: Finished, grey: Path, tmp_path: Path) -> None:
    """In a site's folder a mask has its image's name: one wrong `--to` would destroy what an expert drew."""
    drawn = tmp_path / "labels/odd.png"
    drawn.parent.mkdir()
    shutil.copy(grey, drawn)
    before = drawn.read_bytes()
    refused(call("predict", finished("fedavg"), grey, "--to", drawn.parent), "already has odd.png", "another folder")
    assert [path.name for path in drawn.parent.iterdir()] == ["odd.png"]
    assert drawn.read_bytes() == before


def test_a_place_that_cannot_be_made_is_said(finished: Finished, grey: Path) -> None:
    refused(call("predict", finished("fedavg"), grey, "--to", "/proc/nothing"), "cannot write into /proc/nothing")


def test_a_prediction_is_replaced_by_the_next(finished: Finished, grey: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert call("predict", finished("fedavg"), grey, "--to", tmp_path / "out").status == 0


def test_an_interrupted_prediction_can_be_repeated(
    finished: Finished, grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is listed, so that it is known to be a prediction."""
    shutil.copy(grey, grey.with_name("second.png"))
    written = prediction.write_mask

    def interrupted(mask: Any, picture: Any, out: Path) -> Path:
        if out.name == "second.png":
            raise KeyboardInterrupt
        return written(mask, picture, out)

    with monkeypatch.context() as patch:
        patch.setattr(prediction, "write_mask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prediction.predict(finished("fedavg"), [grey.parent], tmp_path / "out")
    assert [Path(row["image"]).name for row in table(tmp_path / "out")] == ["odd.png"]
    assert call("predict", finished("fedavg"), grey.parent, "--to", tmp_path / "out").status == 0
    assert [Path(row["image"]).name for row in table(tmp_path / "out")] == ["odd.png", "second.png"]


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_an_unfinished_run_has_no_model_yet(
    command: str, finished: Finished, federation: Path, grey: Path, tmp_path: Path
) -> None:
    """Of FedSM the personal models may be there, and the selector not."""
    run = tmp_path / "run"
    shutil.copytree(finished("fedsm"), run, ignore=shutil.ignore_patterns("summary.json", "*.safetensors"))
    asked = [grey, "--to", tmp_path / "out"] if command == "predict" else [federation]
    refused(call(command, run, *asked), "is not finished; continue it with `consilium resume")


def test_images_that_differ_in_their_format_alone(finished: Finished, grey: Path, tmp_path: Path) -> None:
    """The mask of odd.bmp is odd.png too, and one must not replace the other."""
    Image.open(grey).save(grey.with_suffix(".bmp"))
    refused(call("predict", finished("fedavg"), grey.parent, "--to", tmp_path / "out"), "odd.png", "different folders")
    twin = tmp_path / "other/odd.bmp"
    twin.parent.mkdir()
    grey.with_suffix(".bmp").rename(twin)
    call("predict", finished("fedavg"), grey, twin, "--to", tmp_path / "out")
    assert [Path(row["prediction"]).name for row in table(tmp_path / "out")] == ["in_odd.png", "other_odd.png"]


def test_images_of_one_name_but_for_capitals(finished: Finished, grey: Path, tmp_path: Path) -> None:
    """On many disks Odd.png and odd.png are one file."""
    twin = tmp_path / "other/Odd.png"
    twin.parent.mkdir()
    shutil.copy(grey, twin)
    call("predict", finished("fedavg"), grey, twin, "--to", tmp_path / "out")
    assert [Path(row["prediction"]).name for row in table(tmp_path / "out")] == ["in_odd.png", "other_Odd.png"]


@pytest.mark.parametrize("option", ["--overlays", "--probabilities"])
def test_what_is_beside_a_mask_is_never_shared(option: str, finished: Finished, grey: Path, tmp_path: Path) -> None:
    """The masks odd.png and odd.npy differ, but odd-overlay.png and odd-probabilities.npy would be of both."""
    array = grey.with_suffix(".npy")
    np.save(array, np.asarray(Image.open(grey)))
    refused(call("predict", finished("fedavg"), grey.parent, "--to", tmp_path / "out", option), "odd-", "different")
    array = array.rename(tmp_path / "odd.npy")
    call("predict", finished("fedavg"), grey, array, "--to", tmp_path / "out", option)
    written = sorted(path.name for path in (tmp_path / "out").iterdir() if "-" in path.name)
    assert len(written) == 2 and written[0].startswith("in_odd-")


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_bad_images_get_a_sentence(json_too: list[str], finished: Finished, grey: Path, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "colour.png")
    (tmp_path / "cut.png").write_bytes(grey.read_bytes()[:60])
    (tmp_path / "letter.txt").write_text("dear colleague")
    (tmp_path / "empty").mkdir()
    unusable = {
        "colour.png": ["colour", "3 channels", "but the model takes 2-D images with 1 channel; convert it."],
        "cut.png": ["cannot be read"],
        "letter.txt": ["format", ".nii.gz"],
    }
    absent = {"nowhere.png": ["there is no image"], "empty": ["has no images"]}
    for name, words in {**unusable, **absent}.items():
        done = call("predict", finished("fedavg"), tmp_path / name, "--to", tmp_path / "out", *json_too)
        if json_too and name in unusable:  # the document is the same as where some images can be used
            (error,) = done.document["errors"]
            assert done.document["predictions"] == [] and error in done.err
            done = replace(done, out="")
        refused(done, str(tmp_path / name), *words)


def test_what_is_not_a_run(federation: Path, grey: Path, tmp_path: Path) -> None:
    refused(call("predict", federation, grey, "--to", tmp_path / "out"), "is not a run")


def test_what_a_file_browser_leaves_in_a_folder_is_no_image(finished: Finished, grey: Path, tmp_path: Path) -> None:
    for left in ("._odd.png", "__MACOSX/odd.png", ".trash/odd.png"):
        (grey.parent / left).parent.mkdir(exist_ok=True)
        (grey.parent / left).write_bytes(b"resource fork")
    assert call("predict", finished("fedavg"), grey.parent, "--to", tmp_path / "out").status == 0
    assert [row["image"] for row in table(tmp_path / "out")] == [str(grey)]


def test_images_are_never_overwritten(finished: Finished, grey: Path) -> None:
    before = grey.read_bytes()
    call("predict", finished("fedavg"), grey.parent, "--to", grey.parent)
    for name in ("odd.png", "odd.bmp"):  # beside them, the mask of odd.bmp would be odd.png in the first folder
        (grey.parent / "more").mkdir(exist_ok=True)
        Image.open(grey).save(grey.parent / "more" / name)
    call("predict", finished("fedavg"), grey.parent, "--to", grey.parent)
    assert grey.read_bytes() == before


def test_an_image_under_another_name_is_never_overwritten(finished: Finished, grey: Path, tmp_path: Path) -> None:
    """A file has two names after a hard link, and on a disk that does not distinguish capitals."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/odd.png").hardlink_to(grey)
    before = grey.read_bytes()
    refused(call("predict", finished("fedavg"), grey, "--to", tmp_path / "out"), "overwrite the images")
    assert grey.read_bytes() == before


def test_a_stack_of_images_is_never_overwritten(finished: Finished, grey: Path, tmp_path: Path) -> None:
    """Its own masks are test-00000.npy and so on, but that of another image can be test.npy."""
    one, stack = tmp_path / "one/test.npy", tmp_path / "stack/test.npy"
    for path, copies in ((one, 1), (stack, 3)):
        path.parent.mkdir()
        np.save(path, np.stack([np.asarray(Image.open(grey))] * copies).squeeze())
    before = stack.read_bytes()
    refused(call("predict", finished("fedavg"), stack, one, "--to", stack.parent), "overwrite the images")
    assert stack.read_bytes() == before
    assert call("predict", finished("fedavg"), stack, "--to", stack.parent).status == 0


def test_a_run_folder_is_enough(finished: Finished, grey: Path, tmp_path: Path) -> None:
    """A hospital that was handed the run folder has no federation on its disk."""
    run = tmp_path / "handed over"
    shutil.copytree(finished("fedavg"), run)
    text = (run / "study.toml").read_text()
    (run / "study.toml").write_text(text.replace('federation"\n', 'elsewhere"\n', 1))
    assert call("predict", run, grey, "--to", tmp_path / "out").status == 0


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_bad_images_among_many(json_too: list[str], finished: Finished, grey: Path, tmp_path: Path) -> None:
    """The others are predicted and told; the command ends with what is wrong."""
    for name in ("z.png", "zz.png"):
        (grey.parent / name).write_bytes(grey.read_bytes()[:60])
    done = call("predict", finished("fedavg"), grey.parent, "--to", tmp_path / "out", *json_too)
    assert done.status == 2 and "2 of 3 images could not be used" in done.err
    assert [Path(row["prediction"]).name for row in table(tmp_path / "out")] == [grey.name]
    (grey.parent / "zz.png").unlink()
    assert (
        f"The other one is in {tmp_path / 'out'}."
        in call("predict", finished("fedavg"), grey.parent, "--to", tmp_path / "out").err
    )
    if json_too:
        assert [one["image"] for one in done.document["predictions"]] == [str(grey)]
        assert [any(name in error for error in done.document["errors"]) for name in ("z.png", "zz.png")] == [True, True]
    else:
        assert done.out.strip() == str(tmp_path / "out/predictions.csv") and f"{grey}: " in done.err


def test_site_is_the_reason(finished: Finished, grey: Path, tmp_path: Path) -> None:
    call("predict", finished("fedsm"), grey, "--to", tmp_path / "out", "--site", "bea")
    assert "--site" in table(tmp_path / "out")[0]["why"]
