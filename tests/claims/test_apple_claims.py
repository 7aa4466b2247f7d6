"""What the APPLE paper says of its relationships, on the toy federation and on drawn digits.

python -m pytest -m claims -n 0 -s tests/claims/test_apple_claims.py
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from consilium import packet_files
from consilium.data.phantoms import write_phantom
from consilium.data.site_folder import read_federation
from consilium.methods.apple import APPLE, mixed
from consilium.reports.reading import read_run
from consilium.reports.relationships import Relationships, read_relationships
from consilium.run_folder import RunFolder
from consilium.simulation import run
from consilium.study_reading import make_study
from consilium.weights import Weights
from tests.toy import toy_study

pytestmark = pytest.mark.claims


def trained(federation: Path, to: Path, **fields: Any) -> tuple[Relationships, dict[str, Weights]]:
    """p of every site after twelve rounds, and everyone's mixture of the cores as they are on the server."""
    changes = {f"method__{key}": value for key, value in fields.items()}
    sgd = {"local__optimizer": "sgd", "local__momentum": 0.9, "local__lr": 0.05}
    sgd |= {"local__epochs": 2, "local__batch_size": 2}  # twice the toy's steps: p needs them in twelve rounds
    study = toy_study(federation, "apple", study__rounds=12, study__score_every=12, **sgd, **changes)
    folder = run(study, to, workers=0).folder
    server = packet_files.load(folder / "last.safetensors", APPLE.Server)
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


DIGITS: dict[str, dict[str, Any]] = {
    "study": {"rounds": 12, "score_every": 12},
    "task": {"network": "cnn", "widths": [8, 16], "hidden": 64},
    "local": {"optimizer": "sgd", "momentum": 0.9, "lr": 0.01, "epochs": 5, "batch_size": 8},
    "method": {"name": "apple"},
}


@pytest.mark.timeout(3600)
def test_the_largest_relationships_are_with_sites_that_share_a_class(tmp_path: Path) -> None:
    """On digits of which every site sees two classes, mean of seeds 0 to 2.

    Of a site's k largest peers, k being how many share a class with it, 0.67, 0.63 and 0.63 do; by chance 0.24.
    p is 0.31 with peers that share a class and 0.02 with others. The bounds were set after these figures were seen, far
    from them; that *all* the largest peers share a class does not hold: a large site mostly takes its own core.
    """
    hits, chances, gaps = [], [], []
    for seed in (0, 1, 2):
        place = tmp_path / f"digits-{seed}"
        write_phantom("digits", place, cases=2100, seed=seed)
        study = {**DIGITS, "study": {**DIGITS["study"], "seed": seed}, "data": {"federation": str(place)}}
        p = read_relationships(read_run(run(make_study(study, tmp_path), tmp_path, workers=0).folder)).matrix()
        held = {site.name: {case.label for case in site.cases} for site in read_federation(place).sites.values()}
        found = {site: _sharing(row, site, held) for site, row in p.items()}
        hits.append(statistics.fmean(hit for hit, _ in found.values()))
        chances.append(statistics.fmean(chance for _, chance in found.values()))
        pairs = [(bool(held[i] & held[j]), p[i][j]) for i in p for j in p if i != j]
        alike, unlike = (
            statistics.fmean(value for shared, value in pairs if shared is which) for which in (True, False)
        )
        gaps.append(alike - unlike)
        print(f"seed {seed}: {hits[-1]:.3f} of the largest peers share a class, by chance {chances[-1]:.3f}; ", end="")
        print(f"p {alike:.3f} with those that share a class, {unlike:.3f} with others")
    assert statistics.fmean(hits) >= 2 * statistics.fmean(chances)
    assert statistics.fmean(gaps) > 0.15


def _sharing(row: dict[str, float], site: str, held: dict[str, set[str | None]]) -> tuple[float, float]:
    """Of the k largest peers of a site the share that has a class of it, and that of all its peers."""
    peers = sorted((other for other in row if other != site), key=row.__getitem__, reverse=True)
    alike = [bool(held[site] & held[other]) for other in peers]
    return statistics.fmean(alike[: sum(alike)]), statistics.fmean(alike)
