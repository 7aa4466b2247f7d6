"""A plan from fingerprints: every rule on figures that can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consilium.data.fingerprint import SiteFingerprint, fingerprints, read_fingerprints
from consilium.errors import DataError
from consilium.planning import PlanLine, plan, write_plan
from consilium.study_reading import load_study
from tests.cli.terminal import call, refused

CT = SiteFingerprint(
    site="a", task="segmentation", labels=("liver", "spleen"), dimensions=3, channels=1, contains={},
    annotated=("liver", "spleen"), cases=40, size=(60, 512, 512), spacing=(5.0, 0.8, 0.8), finest=(2.5, 0.7, 0.7),
    types=("int16",), lowest=-1024, bright=300, inside=(-50, 100, 200, 100, 40), shares={"liver": 0.03},
)  # fmt: skip
PHOTO = replace(
    CT, labels=("disc",), dimensions=2, channels=3, annotated=("disc",), size=(600, 800), spacing=(), finest=(),
    types=("uint8",), lowest=0, inside=(),
)  # fmt: skip


def values(lines: list[PlanLine]) -> dict[str, Any]:
    assert all(line.why for line in lines)
    return {line.key: line.value for line in lines}


def test_thick_slices_get_the_finest_tenth_and_flat_levels() -> None:
    found = values(plan([CT, replace(CT, site="b", cases=10, spacing=(3.0, 0.6, 0.6))], "fedavg", 10))
    assert found["spacing"] == [2.5, 0.8, 0.8]  # 40 of 50 cases are a's; 5 mm is over 3 × 0.8
    assert found["window"] == [-50, 200] and found["normalise"] == "unit"
    assert found["network"] == "dynunet" and found["flat_levels"] == 2  # log2(2.5 / 0.8) = 1.6
    patch = found["patch"]
    assert patch[0] * patch[1] * patch[2] <= 112**3 and patch[1] == patch[2] and patch[1] % 16 == 0
    assert len(found["widths"]) == 1 + 4 or len(found["widths"]) == 1 + 5
    assert "flip" in found["augment"] and found["batch_size"] == 2


def test_memory_decides_the_patch() -> None:
    sizes = {gb: values(plan([CT], "fedavg", 1, gb))["patch"] for gb in (2.0, 8.0)}
    assert sizes[2.0][0] * sizes[2.0][1] * sizes[2.0][2] <= 112**3 / 4 < sizes[8.0][0] * sizes[8.0][1] * sizes[8.0][2]


def test_small_volumes_get_a_batch_of_a_twentieth_of_all_voxels() -> None:
    """As many patches as 129 × 35 × 50 × 35 / 20 voxels make, of 32 × 48 × 32 each: 8.04."""
    small = replace(CT, cases=129, size=(35, 50, 35), spacing=(1.0, 1.0, 1.0), finest=(1.0, 1.0, 1.0))
    found = values(plan([small], "fedavg", 10))
    assert (found["patch"], found["batch_size"]) == ([32, 48, 32], 8)
    assert values(plan([small], "fedavg", 10, 0.5))["batch_size"] == 3  # 2 × 112³ / 16 voxels in 0.5 GB


def test_pictures_get_one_size_and_a_batch_of_the_smallest_site() -> None:
    found = values(plan([PHOTO, replace(PHOTO, site="b", cases=5)], "fedsm", 10))
    assert found["size"] == [384, 512]  # 600×800 shrunk by 512/800
    assert (found["network"], found["normalise"], found["batch_size"]) == ("unet2d", "unit", 5)
    assert found["widths"] == [16, 32, 64, 128, 256, 512]
    assert found["augment"] == ["flip", "rotate*1.5", "scale*1.5", "brightness", "noise"]  # 45 cases are few


def test_values_without_a_unit_are_normalised_by_case() -> None:
    mr = replace(CT, lowest=0, bright=300)
    found = values(plan([mr, replace(mr, site="b", bright=1200)], "fedavg", 1))
    assert (found["percentiles"], found["normalise"]) == ([0.5, 99.5], "zscore")
    assert "brightness*2" in found["augment"]


def test_a_label_with_a_side_is_not_mirrored() -> None:
    sided = replace(CT, labels=("left kidney", "right kidney"))
    assert "flip" not in values(plan([sided], "fedavg", 1))["augment"]


def test_methods_that_part_a_network_get_one_with_parts() -> None:
    found = values(plan([CT, replace(CT, site="b")], "ufps", 1))
    assert found["network"] == "plain-unet" and "flat_levels" not in found


def test_hospitals_send_fingerprints_and_no_names(federation: Path, tmp_path: Path) -> None:
    done = call("plan", federation, "--fingerprint", tmp_path / "fp.json")
    assert (done.status, done.out) == (0, f"{tmp_path / 'fp.json'}\n")
    text = (tmp_path / "fp.json").read_text()
    assert not [word for word in ("ada0", "png", str(federation)) if word in text]
    assert read_fingerprints(tmp_path / "fp.json") == fingerprints(federation)
    entries = json.loads(text)["fingerprints"]
    files = []
    for entry in entries:  # one file per hospital
        files.append(tmp_path / f"{entry['site']}.json")
        files[-1].write_text(json.dumps({"fingerprints": [entry]}))
    apart = call("plan", *files, "--to", tmp_path / "apart.toml", "--method", "fedavg")
    assert apart.status == 0, apart.err
    together = call("plan", federation, "--to", tmp_path / "together.toml", "--method", "fedavg")
    assert together.status == 0, together.err
    one, two = (load_study(tmp_path / f"{name}.toml") for name in ("apart", "together"))
    assert (one.preprocess, one.task_fields, one.network, one.local) == (
        two.preprocess, two.task_fields, two.network, two.local,
    )  # fmt: skip
    assert "  # " in (tmp_path / "together.toml").read_text()
    refused(call("plan", federation, "--to", tmp_path / "together.toml"), "exists already")
    files[0].write_text('{"fingerprints": [{"site": 3}]}')
    refused(call("plan", *files, "--to", tmp_path / "new.toml"), "holds no fingerprints")


def test_sites_of_different_tasks_are_refused() -> None:
    with pytest.raises(DataError, match="plan one task at a time"):
        plan([CT, replace(PHOTO, site="b")], "fedavg", 1)
    with pytest.raises(DataError, match="named twice"):
        plan([CT, CT], "fedavg", 1)


def test_a_planned_study_can_be_read(tmp_path: Path) -> None:
    sites = [CT, replace(CT, site="b", annotated=("liver",))]
    study = load_study(write_plan(sites, plan(sites, "ufps", 7), None, tmp_path / "s.toml"))
    assert (study.plan.rounds, study.facts.labels) == (7, ("liver", "spleen"))
    assert (study.preprocess.orientation, study.local.optimizer_state) == ("RAS", "kept")  # not those of 0.1
