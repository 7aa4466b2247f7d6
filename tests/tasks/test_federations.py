"""A federation of volumes and one of classes, from files to predictions, with FedAvg and FedSM."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from consilium import simulation
from consilium.data.site_folder import Case
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.errors import StudyError
from consilium.prediction import predict
from consilium.run_folder import RunFolder
from consilium.study_reading import make_study

SITES = {"ada": (2, 1, 1), "bea": (3, 1, 1), "cid": (2, 1, 1)}


def splits(site: str) -> list[tuple[int, str]]:
    names = [name for name, count in zip(("train", "valid", "test"), SITES[site]) for _ in range(count)]
    return list(enumerate(names))


def write_volumes(folder: Path) -> Path:
    """Volumes of 12 × 16 × 16 voxels with a bright ball, as NIfTI; sites differ in contrast."""
    write_federation_toml(folder, "segmentation", ["ball"], 3, 1)
    for number, site in enumerate(SITES):
        cases = []
        (folder / site).mkdir(parents=True)
        for index, split in splits(site):
            rng = np.random.default_rng([number, index])
            x, y, z = np.mgrid[:16, :16, :12]
            ball = (x - 8) ** 2 + (y - rng.integers(6, 10)) ** 2 + (z - 6) ** 2 < 12
            volume = rng.normal(100, 5, ball.shape) + ball * (60 + 60 * number)
            paths = [folder / site / f"{kind}{index}.nii.gz" for kind in ("image", "label")]
            for array, path in zip((volume.astype(np.float32), ball.astype(np.uint8)), paths):
                nibabel.save(nibabel.Nifti1Image(array, np.diag([1.0, 1.0, 3.0, 1.0])), path)
            cases.append(Case(f"{site}{index}", f"p{index}", split, *paths))
        write_site(folder, site, cases)
    return folder


def write_classes(folder: Path) -> Path:
    """16-pixel pictures, bright above or bright below; sites differ in contrast."""
    write_federation_toml(folder, "classification", ["above", "below"], 2, 1)
    for number, site in enumerate(SITES):
        cases = []
        (folder / site).mkdir(parents=True)
        for index, split in [pair for pair in splits(site) for _ in range(2)]:
            place = len(cases)
            rng = np.random.default_rng([number, place])
            picture = rng.normal(80, 10, (16, 16))
            label = ("above", "below")[place % 2]
            picture[slice(0, 8) if label == "above" else slice(8, 16)] += 40 + 30 * number
            path = folder / site / f"{place}.png"
            Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8)).save(path)
            cases.append(Case(f"{site}{place}", f"p{index}", split, path, label))
        write_site(folder, site, cases)
    return folder


WRITERS = {"volumes": write_volumes, "classes": write_classes}
TASKS: dict[str, dict[str, Any]] = {
    "volumes": {"widths": [4, 8], "residual_units": 1, "selector_widths": [4, 8], "patch": [8, 16, 16]},
    "classes": {"widths": [4, 8], "hidden": 16, "selector_widths": [4, 8], "augment": ["noise"]},
}
METRICS = {"volumes": "dice", "classes": "accuracy"}


@pytest.fixture(scope="module", params=list(WRITERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def place(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[kind](tmp_path_factory.mktemp(kind) / "federation")


@pytest.mark.parametrize("method", ["fedavg", "fedsm"])
def test_trained_scored_and_predicted(kind: str, method: str, place: Path, tmp_path: Path) -> None:
    study = make_study({
        "study": {"rounds": 2, "score_every": 1},
        "data": {"federation": str(place)},
        "task": TASKS[kind],
        "local": {"batch_size": 2, "lr": 0.01},
        "method": {"name": method},
    })  # fmt: skip
    result = simulation.run(study, tmp_path / "runs", workers=0)
    headline = result.summary["headline"]
    assert (headline["metric"], headline["model"]) == (METRICS[kind], "super" if method == "fedsm" else "global")
    assert set(headline["sites"]) == set(SITES)
    assert all(0 <= score <= 1 for score in headline["sites"].values())
    metrics = {row.metric for row in RunFolder.open(result.folder).rows()}
    assert metrics >= ({"dice", "jaccard", "sensitivity", "volume_error"} if kind == "volumes" else {"accuracy", "auc"})
    if method == "fedsm":
        assert {metric for metric in metrics if metric.startswith("chosen:")}

    image = next(path for path in sorted((place / "bea").iterdir()) if path.name.startswith(("image4", "9")))
    (done,) = predict(result.folder, [image], tmp_path / "out")
    assert done.model.partition("/")[0] in ("global", "personal")
    if kind == "volumes":
        mask, like = nibabel.load(done.result), nibabel.load(image)
        assert mask.shape == like.shape == (16, 16, 12)
        np.testing.assert_array_equal(mask.affine, like.affine)
        assert set(np.unique(np.asarray(mask.dataobj))) <= {0, 1}
    else:
        assert done.result in ("above", "below")
    (line,) = csv.DictReader((tmp_path / "out" / "predictions.csv").read_text().splitlines())
    assert line["model"] == done.model
    if method == "fedsm":
        assert sum(float(line[f"chance:{site}"]) for site in SITES) == pytest.approx(1.0, abs=1e-4)


def test_a_window_of_another_dimension_is_refused(place: Path, kind: str) -> None:
    if kind == "classes":
        pytest.skip("a class has no windows")
    tables = {"data": {"federation": str(place)}, "method": {"name": "fedavg"}, "task": {"patch": [8, 8]}}
    with pytest.raises(StudyError, match="3-D images"):
        make_study(tables)
