"""Methods that do the same thing at a site do it bit by bit alike: what differs in a table is the method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from consilium import packet_files
from consilium.contract import run_in_process
from tests.toy import toy_study


@pytest.mark.parametrize(
    ("optimizer_state", "shares"),
    [
        ("kept", "cases"),
        ("fresh", "uniform"),
        pytest.param("kept", "uniform", marks=pytest.mark.slow),
        pytest.param("fresh", "cases", marks=pytest.mark.slow),
    ],
)
def test_fedsms_own_global_model_is_fedavgs(
    optimizer_state: str, shares: str, federation: Path, tmp_path: Path
) -> None:
    """After every round the same weights: what FedSM's super model has above FedAvg is not its global model's."""
    last: dict[str, Any] = {}
    for method in ("fedavg", "fedsm", "fedavg-local"):
        changes = {"local__optimizer_state": optimizer_state, "method__shares": shares, "local__batch_size": 4}
        study = toy_study(federation, method, study__rounds=2, **changes)
        run = run_in_process(study, tmp_path)
        last[method] = packet_files.load(run.folder / "last.safetensors", study.method.Server).global_.digest
    assert len(set(last.values())) == 1


@pytest.mark.slow
def test_both_fields_change_the_model(federation: Path, tmp_path: Path) -> None:
    """The test above would pass too if nobody read them."""
    found = set()
    for state in ("kept", "fresh"):
        for shares in ("cases", "uniform"):
            changes = {"local__optimizer_state": state, "method__shares": shares, "local__batch_size": 4}
            study = toy_study(federation, "fedavg", study__rounds=2, **changes)
            run = run_in_process(study, tmp_path)
            found.add(packet_files.load(run.folder / "last.safetensors", study.method.Server).global_.digest)
    assert len(found) == 4
