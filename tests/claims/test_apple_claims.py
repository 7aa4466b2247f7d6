"""What the APPLE paper says of its relationships, on the toy federation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from consilium import tree
from consilium.analysis.relationships import Relationships, read_relationships
from consilium.methods.apple import APPLE, mixed
from consilium.reports.reading import read_run
from consilium.run_folder import RunFolder
from consilium.simulation import run
from consilium.weights import Weights
from tests.toy import toy_study

pytestmark = pytest.mark.claims


def trained(federation: Path, to: Path, **fields: Any) -> tuple[Relationships, dict[str, Weights]]:
    """p of every site after twelve rounds, and everyone's mixture of the cores as they are on the server."""
    changes = {f"method__{key}": value for key, value in fields.items()}
    sgd = {"local__optimizer": "sgd", "local__momentum": 0.9, "local__lr": 0.05, "local__epochs": 2}
    study = toy_study(federation, "apple", study__rounds=12, study__score_every=12, **sgd, **changes)
    folder = run(study, to, workers=0).folder
    server = tree.load(folder / "last.safetensors", APPLE.Server)
    found = read_relationships(read_run(folder))
    assert RunFolder.open(folder).finished
    return found, {site: mixed(server.cores, p) for site, p in found.matrix().items()}


def apart(models: dict[str, Weights]) -> float:
    """The largest distance between two personal models, in lengths of the first."""
    first, *_ = models.values()
    return max((a - b).norm() for a in models.values() for b in models.values()) / first.norm()


def test_a_strong_hold_makes_all_personal_models_one(federation: Path, tmp_path: Path) -> None:
    """With μ large and λ near 1 throughout, p stays near p0; frozen it is p0, and the mixtures coincide bit by bit."""
    held, near = trained(federation, tmp_path, mu=500.0, scheduler_rounds=1e6)
    _, far = trained(federation, tmp_path, mu=0.0)
    frozen, same = trained(federation, tmp_path, relation_lr=0.0)
    assert len({model.digest for model in same.values()}) == 1
    assert all(p == pytest.approx(frozen.p0, abs=1e-6) for p in frozen.matrix().values())
    assert apart(near) < 0.1 * apart(far)
    assert max(abs(p - held.p0[j]) for row in held.matrix().values() for j, p in row.items()) < 0.02


def test_every_site_comes_to_take_more_from_its_own_core(federation: Path, tmp_path: Path) -> None:
    found, _ = trained(federation, tmp_path)
    for site in found.sites:
        assert found.own(site)[-1] > found.p0[site] + 0.02, f"{site}: {found.own(site)}"
