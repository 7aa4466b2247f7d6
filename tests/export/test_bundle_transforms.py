"""MONAI's transforms in a bundle do what the study's [preprocess] and decisions do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform
from PIL import Image

from consilium.data.images import read_image
from consilium.data.preprocess import forward
from consilium.export import transforms
from consilium.export.bundle import inference
from consilium.export.network import portable
from consilium.study import Study
from consilium.study_reading import make_study

pytestmark = pytest.mark.xdist_group("monai")  # one process loads it


def study_of(preprocess: dict[str, Any], **facts: Any) -> Study:
    given = {"task": "segmentation", "labels": ["disc", "cup"], "dimensions": 2, "channels": 3, **facts}
    tables = {"data": {"federation": "."}, "method": {"name": "fedavg"}, "facts": given, "preprocess": preprocess}
    return make_study({**tables, "task": {} if given["task"] == "classification" else {"widths": [4, 8]}})


def parsed(study: Study, key: str, **changes: str) -> Any:
    from monai.bundle import ConfigParser

    parser = ConfigParser({**inference(study, portable(study)), **changes})
    return parser.get_parsed_content(key)


@pytest.mark.parametrize(
    ("preprocess", "differ"),
    [
        ({}, 1e-6),
        ({"normalise": "none"}, 1e-6),
        ({"normalise": "zscore"}, 1e-5),
        ({"window": [50, 150]}, 1e-6),
        ({"window": [50, 150], "normalise": "zscore"}, 1e-5),
        ({"window": [50, 150], "normalise": "none"}, 1e-4),
        ({"crop": "foreground"}, 1e-6),
        ({"crop": "positive"}, 1e-6),
        ({"normalise": "signed"}, 1e-6),
        ({"window": [50, 150], "normalise": "signed"}, 1e-6),
        ({"percentiles": [2, 98]}, 1e-5),
        ({"percentiles": [2, 98], "normalise": "signed"}, 1e-5),
        ({"percentiles": [2, 98], "normalise": "zscore"}, 1e-5),
        ({"percentiles": [2, 98], "normalise": "none"}, 1e-3),
        ({"size": [60, 50]}, 1e-5),  # enlarging
        ({"size": [12, 10]}, 0.05),  # shrinking: another smoothing, as the metadata say
    ],
)
def test_preprocessing_is_the_study_s(preprocess: dict[str, Any], differ: float, tmp_path: Path) -> None:
    y, x = np.mgrid[:41, :33]
    picture = np.zeros((41, 33, 3), np.uint8)
    picture[8:30, 6:28] = (120 + 60 * np.sin(y / 5) + 60 * np.cos(x / 4))[8:30, 6:28, None] * [1.0, 0.8, 0.6]
    Image.fromarray(picture).save(tmp_path / "a.png")
    study = study_of(preprocess)
    ours, _ = forward(read_image(tmp_path / "a.png", 2, 3), study.preprocess)
    theirs = parsed(study, "preprocessing")({"image": str(tmp_path / "a.png")})["image"]
    assert all(side % 2 == 0 for side in theirs.shape[1:])  # padded for the network
    inside = theirs[:, : ours.shape[1], : ours.shape[2]].numpy()
    assert np.abs(inside - ours).max() < differ
    assert bool(transforms.differences(study, 2)) == bool({"size", "crop"} & set(preprocess))


@pytest.mark.parametrize("code", ["RAS", "LPI", "PIR", "SLA"])
def test_volumes_are_brought_to_the_study_s_orientation_and_masks_back(code: str, tmp_path: Path) -> None:
    volume = np.random.default_rng(0).integers(0, 900, (6, 8, 10)).astype(np.int16)  # (x, y, z), RAS
    image = nibabel.Nifti1Image(volume, np.diag([0.5, 0.75, 3.0, 1]))
    image = image.as_reoriented(ornt_transform(io_orientation(image.affine), axcodes2ornt(code)))
    nibabel.save(image, tmp_path / "a.nii.gz")
    study = study_of({"orientation": "RAS"}, dimensions=3, channels=1)
    ours, _ = forward(read_image(tmp_path / "a.nii.gz", 3, 1), study.preprocess)
    back, decide, save = parsed(study, "postprocessing", output_dir=str(tmp_path)).transforms
    prepared = back.transform({"image": str(tmp_path / "a.nii.gz")})  # @preprocessing of the same workflow
    assert np.abs(prepared["image"].numpy() - ours).max() < 1e-6
    logits = torch.stack([torch.zeros(ours.shape[1:]), prepared["image"][0] - 0.5, prepared["image"][0] - 0.7])
    prepared["pred"] = prepared["image"].clone()
    prepared["pred"].set_array(logits)
    save(decide(back(prepared)))
    mask = nibabel.load(tmp_path / "a_mask.nii.gz")
    assert np.allclose(mask.affine, image.affine)
    bright = np.asarray(image.dataobj) - volume.min() > 0.5 * (volume.max() - volume.min())
    assert np.array_equal(np.asarray(mask.dataobj) == 1, bright)


def test_inner_structures_overwrite_outer_ones() -> None:
    study = study_of({}, contains={"disc": ["cup"]})
    *_, decide, _ = parsed(study, "postprocessing", output_dir="nowhere").transforms
    logits = torch.tensor([[[-1.0, 1.0, 1.0, -1.0]], [[-1.0, -1.0, 1.0, 1.0]]])
    mask = decide({"pred": logits})["pred"]
    assert mask.tolist() == [[[0.0, 1.0, 2.0, 2.0]]]
    assert mask[0].to(torch.uint8).equal(study.task.decide(logits))


def test_windows_are_monai_s_sliding_windows() -> None:
    study = study_of({})
    assert transforms.inferer(study, 2) == {"_target_": "SimpleInferer"}
    windows = make_study({**study.tables(), "task": {**study.tables()["task"], "patch": [7, 8]}})
    assert transforms.inferer(windows, 2)["roi_size"] == [8, 8]
    assert "rounded up" in transforms.differences(windows, 2)[0]


def test_volumes_are_predicted_slice_by_slice() -> None:
    """A 2-D network on a volume (channels, z, y, x): every slice as if it were alone; z is not padded or resized."""
    study = study_of({"slices": "axial", "size": [20, 17]}, dimensions=3, channels=1)
    network, slices = parsed(study, "network_def").eval().double(), parsed(study, "inferer")
    volume = torch.rand((1, 1, 5, 20, 18), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([network(volume[:, :, z]) for z in range(5)], dim=2)
        assert torch.allclose(
            slices(volume, network), expected, atol=1e-9
        )  # in double precision: how slices are batched leaves no trace
    steps = {step["_target_"]: step for step in transforms.preprocessing(study, 2)}
    assert steps["Resized"]["spatial_size"] == [-1, 20, 17]
    assert steps["DivisiblePadd"]["k"] == [1, 2, 2]


@pytest.mark.parametrize(
    ("network", "package"), [("cnn", ""), ("vgg-small", ""), ("vgg-small-standardised", "consilium")]
)
def test_classifiers_are_layers_of_torch(network: str, package: str) -> None:
    """The same names, shapes and logits, without consilium's classes where the layers are torch's own."""
    study = study_of({"size": [28, 28]}, task="classification", channels=1)
    fields = {"network": network.removesuffix("-standardised")}
    if network.endswith("-standardised"):
        fields["standardise"] = True  # type: ignore[assignment]
    study = make_study({**study.tables(), "task": fields})
    assert portable(study).packages == ((package,) if package else ())
    made, weights = parsed(study, "network_def"), study.task.initial()
    made.load_state_dict(dict(weights))
    images = torch.rand((2, 1, 28, 28), generator=torch.Generator().manual_seed(0))
    assert made.eval()(images).allclose(study.task.infer(weights, images), atol=1e-6)
