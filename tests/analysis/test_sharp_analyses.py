"""Likeness, steep gradients, landscapes and overlays: exact where they can be, and whole runs through the command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from consilium.analysis.analyse import analyse
from consilium.analysis.finding import Options
from consilium.analysis.landscape import plane
from consilium.analysis.loss_surface import direction
from consilium.analysis.opening import Runs
from consilium.analysis.overlays import OverlayCase, projections, scores, shown_cases, slices
from consilium.analysis.probing import training_batches
from consilium.analysis.similarity import features, linear_cka
from consilium.analysis.steepness import relative_difference
from consilium.errors import RunError, UserError
from consilium.randomness import torch_generator
from consilium.weights import Weights

pytestmark = pytest.mark.xdist_group("analysis")  # what its tests share is made once

QUICK = Options(points=3, cases=4)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_cka_sees_through_rotations_factors_and_shifts() -> None:
    x = drawn(50, 4)
    turned = 3 * x @ torch.linalg.qr(drawn(4, 4))[0] + 7
    assert linear_cka(x, turned) == pytest.approx(1)
    assert linear_cka(x, drawn(5000, 3)[:50]) < 0.2


def test_cka_by_hand() -> None:
    """Centred x = (−1, 1, 0, 0), y = (−1, 1, −1, 1): (xᵀy)² / (xᵀx · yᵀy) = 4 / (2 · 4)."""
    x, y = torch.tensor([[-1.0], [1.0], [0.0], [0.0]]), torch.tensor([[-1.0], [1.0], [-1.0], [1.0]])
    assert linear_cka(x, y) == pytest.approx(0.5)
    assert linear_cka(x, torch.ones(4, 1)) == 0


def test_relative_difference_by_hand() -> None:
    """Eq. 10: a gradient that doubles has log 1 = 0; one that turns round has log 2; zero has none."""
    base, changed = torch.tensor([1.0, 2.0, 0.0, 4.0]), torch.tensor([2.0, -2.0, 9.0, 4.4])
    assert relative_difference(base, changed).tolist() == pytest.approx([0, math.log(2), math.log(0.1)], abs=1e-6)


def test_a_plane_by_hand() -> None:
    """‖w + x a + y b‖² with w = 0 is x² + y² + 2 x y a·b for unit directions."""
    model = Weights({"w": torch.zeros(6)})
    found = plane(lambda w: w.dot(w), model, radius=2, points=3, seed=1)
    one, other = (direction(model, torch_generator(1, "plane", i)) for i in range(2))
    assert found.losses[1] == pytest.approx((4, 0, 4), abs=1e-6)
    assert found.losses[2][2] == pytest.approx(8 + 8 * one.dot(other), rel=1e-5)
    assert found.centre == 0
    assert found.rise == pytest.approx((4 * 4 + 4 * 8) / 8, rel=1e-5)  # over the edge a·b cancels
    with pytest.raises(UserError, match="odd number of points"):
        plane(lambda w: 0.0, model, 1, 4, 0)


def test_features_are_of_every_layer_in_order(finished: Mapping[str, Path]) -> None:
    (run,) = Runs([finished["fedavg"]]).opened
    here = run.worker("ada").site
    batches = training_batches(here, 3)
    network = here.task.network().eval()
    found = features(network, batches)
    cases = sum(len(batch.cases) for batch in batches)
    assert 3 <= cases < 3 + here.local.batch_size
    assert len(found) == 3  # a convolution down, one below, one up
    assert all(len(x) % cases == 0 for x in found.values())
    last = list(found.values())[-1]
    assert last.shape == (cases * 256, 2)  # a row per pixel, a column per channel


def test_landscape_hessian_and_steepness_of_runs(finished: Mapping[str, Path], tmp_path: Path) -> None:
    runs = [finished["fedavg"], finished["local"]]
    said: list[str] = []
    options = Options(points=3, cases=2, site="bea")
    files = analyse(runs, ["landscape", "hessian", "steepness"], tmp_path, options, said.append)
    assert any(re.fullmatch(r"Hessian of FedAvg: bea, about .* or more", line) for line in said)
    assert {path.name for path in files if path.suffix == ".svg"} == {"landscape.svg", "hessian.svg", "steepness.svg"}
    names = ("landscape", "hessian", "steepness")
    facts = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in names}
    for found in facts.values():
        assert set(found["sites"]["bea"]) == {"FedAvg", "Local"}
    curved = facts["hessian"]["sites"]["bea"]["FedAvg"]
    assert curved["largest"] == sorted(curved["largest"], reverse=True)
    assert sum(share for _, share in curved["nodes"]) == pytest.approx(1)
    (run,) = Runs([finished["fedavg"]]).opened
    assert curved["parameters"] == sum(run.study.task.shape()[name].numel() for name in run.study.task.parameters())
    steep = facts["steepness"]["sites"]["bea"]["FedAvg"]
    assert 0 < steep["steep"] < 1
    assert sum(steep["counts"]) + steep["without"] == curved["parameters"]  # one batch of two cases
    assert "| bea | FedAvg |" in (tmp_path / "hessian.md").read_text()


def test_likeness_between_runs_and_after_a_round(finished: Mapping[str, Path], tmp_path: Path) -> None:
    analyse([finished["fedavg"], finished["pooled"]], ["similarity"], tmp_path / "two", QUICK)
    two = json.loads((tmp_path / "two" / "similarity-ada.json").read_text())
    assert two["beside"] == "FedAvg" and set(two["layers"]) == {"Pooled"}
    before = (finished["fedavg"] / "journal.jsonl").read_bytes()
    analyse([finished["fedavg"]], ["similarity"], tmp_path / "one", QUICK)
    one = json.loads((tmp_path / "one" / "similarity-ada.json").read_text())
    assert set(one["layers"]) == {"trained at ada", "trained at bea", "trained at cid"}
    values = [value for by in one["layers"].values() for value in by.values()]
    assert all(0 < value <= 1 + 1e-9 for value in values) and min(values) < 1 - 1e-6
    assert (finished["fedavg"] / "journal.jsonl").read_bytes() == before
    with pytest.raises(RunError, match="train no shared model"):
        analyse([finished["local"]], ["similarity"], tmp_path / "none", QUICK)


def test_overlays_of_pictures(finished: Mapping[str, Path], tmp_path: Path) -> None:
    files = analyse([finished["fedavg"], finished["pooled"]], ["overlays"], tmp_path, QUICK)
    assert {path.name for path in files} == {"overlays.svg", "overlays.png", "overlays.json"}
    facts = json.loads((tmp_path / "overlays.json").read_text())
    assert facts["cases"]["bea"] == "bea015"  # 12 for training, 3 for validation before it
    (run,) = Runs([finished["fedavg"]]).opened
    rows = [row for row in run_rows(finished["fedavg"]) if row.case == "bea015" and row.metric == "dice"]
    assert facts["dice"]["bea"]["FedAvg"]["blob"] == pytest.approx(rows[-1].value, abs=1e-4)
    assert shown_cases([run], ["ada"])[0].image.shape == (1, 16, 16)


def run_rows(path: Path) -> list:  # type: ignore[type-arg]
    from consilium.run_folder import RunFolder

    return [row for row in RunFolder.open(path).rows() if row.phase == "best" and row.split == "test"]


def test_volumes_are_shown_where_most_labels_are_and_from_the_front() -> None:
    truth = np.zeros((3, 4, 8, 8), dtype=bool)
    truth[0, 1, 2:6, 2:6] = truth[0, 2, 2:7, 2:7] = True
    truth[1, 1, 6:8, :2] = True
    one = OverlayCase("ada", "a1", np.random.default_rng(0).normal(size=(1, 4, 8, 8)).astype(np.float32), truth,
                ("liver", "spleen"), {"FedAvg": truth & (np.arange(8) < 4)})  # fmt: skip
    labels = ("liver", "spleen", "kidney")
    found = scores([one], labels)
    assert set(found["ada"]["FedAvg"]) == {"liver", "spleen"}  # nobody annotated the kidney here
    assert found["ada"]["FedAvg"]["liver"] == pytest.approx(2 * 18 / (41 + 18), abs=1e-4)
    shown = slices([one], labels)
    assert len(shown.axes) == 3  # image, truth, one model
    truth_panel = shown.axes[1].images[1].get_array()
    assert truth_panel.shape == (8, 8, 4)
    assert int((truth_panel[..., 3] > 0).sum()) == 20  # slice 1, with two labels, though slice 2 has the larger one
    front = projections([one], labels).axes[1].images[1].get_array()
    assert front.shape == (4, 8, 4)  # slices run down, columns across
    assert (front[..., 3] > 0).any(1).tolist() == [False, True, True, False]
