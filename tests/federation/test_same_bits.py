"""A federation of processes gives the bits of the simulator."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from consilium import simulation
from consilium.federation.forecasting import forecast_study
from consilium.hospital import read_hospital
from consilium.left_log import left
from consilium.methods import METHODS
from consilium.prediction import open_at_hospital
from tests.federation.conftest import PATIENCE, SITES, Running, digest
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(600)]
SMOKE = ("fedavg", "scaffold", "apfl", "fedsm")  # one without state, two with memory, one with three models
OTHERS = [name for name, kind in METHODS.items() if name not in SMOKE and not getattr(kind, "pooled", False)]


FIELDS: dict[str, dict[str, object]] = {
    # as in every federation
    **{
        name: {"method__share_local_parts": False}
        for name, kind in METHODS.items()
        if hasattr(kind, "share_local_parts")
    },
    "fedsm-network": {"study__name": "network", "method__selector_training": "synchronised"},
}


@pytest.mark.parametrize(
    "method", [*SMOKE, *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedsm-network", *OTHERS))]
)
def test_a_deployed_run_equals_a_simulated_one(running: Running, federation: Path, tmp_path: Path, method: str) -> None:
    name = method.removesuffix("-discriminant")
    study = toy_study(federation, name, study__deadline=60.0, **FIELDS.get(method, {}))
    job = running.admin.submit(study)
    state = running.admin.wait(job, PATIENCE)
    assert state == "FINISHED:COMPLETED", running.admin.outcome(job)
    deployed = running.admin.fetch(job, tmp_path / "fetched")
    simulated = simulation.run(study, tmp_path, workers=0)
    assert digest(deployed) == digest(simulated.folder)
    _nothing_named(deployed, federation)
    _forecast_holds(deployed, study)
    for site in SITES:
        memory = running.local.memory(site)
        assert (memory / deployed.name / "release.safetensors").exists()
        assert {line["what"] for line in left(memory) if line["run"] == deployed.name} == {
            "card",
            "train",
            "score",
            "deliver",
        }


@pytest.mark.slow
def test_normalisation_that_stays_at_the_sites_gives_the_same_bits(
    running: Running, federation: Path, tmp_path: Path
) -> None:
    own = {"local__batchnorm": "local", "task__norm": "batch", "local__batch_size": 4}
    study = toy_study(federation, study__name="own-norm", study__deadline=60.0, **own)
    job = running.admin.submit(study)
    assert running.admin.wait(job, PATIENCE) == "FINISHED:COMPLETED", running.admin.outcome(job)
    deployed = running.admin.fetch(job, tmp_path / "fetched")
    assert digest(deployed) == digest(simulation.run(study, tmp_path, workers=0).folder)
    _, predictor = open_at_hospital(read_hospital(running.local.hospital("bea")), deployed.name)
    images = torch.rand((2, 1, 16, 16), generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(predictor.answer(images).output).all()


def _nothing_named(run: Path, federation: Path) -> None:
    """No case's name and no path of a hospital in anything the server has."""
    names = [image.stem for image in federation.glob("*/images/*.png")]
    for path in run.rglob("*"):
        if path.is_file() and path.suffix in (".csv", ".json", ".jsonl", ".toml"):
            text = path.read_text(encoding="utf-8")
            # whole words: six hexadecimal digits of a sketch may happen to spell "ada002"
            found = [name for name in names if re.search(rf"(?<![0-9A-Za-z]){name}(?![0-9A-Za-z])", text)]
            assert not found, path
            assert str(federation) not in text, path


def _forecast_holds(run: Path, study: object) -> None:
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    own = [event for event in events if event["event"] == "train" and event["site"] == "ada"]
    foreseen = forecast_study(study)  # type: ignore[arg-type]
    training = {exchange.phase for exchange in foreseen.exchanges if exchange.counts}
    down = sum(exchange.down for exchange in foreseen.exchanges if exchange.counts)
    assert sum(e["bytes_down"] for e in own if e["phase"] in training) == pytest.approx(down, rel=0.05)
    # afterwards it may be less: the exchanges of a closed-form selector repeat a model that the site holds by then
    assert sum(event["bytes_down"] for event in own) < 1.05 * foreseen.down
    assert sum(event["bytes_up"] for event in own) == pytest.approx(foreseen.up, rel=0.05)
