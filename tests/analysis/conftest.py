"""Finished runs on the toy federation, made once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from consilium.simulation import run
from tests.toy import toy_study


@pytest.fixture(scope="session")
def finished(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Run folders by name; "guest" and "guest-0.9" are FedSM without the site cid."""
    runs = tmp_path_factory.mktemp("runs")
    studies = {
        "guest": toy_study(federation, "fedsm", study__rounds=2, study__leave_out=["cid"], method__pull=0.6),
        "guest-0.9": toy_study(federation, "fedsm", study__rounds=2, study__leave_out=["cid"], method__pull=0.9),
        "fedavg": toy_study(federation, "fedavg", study__rounds=1),
        "local": toy_study(federation, "local", study__rounds=1),
        "pooled": toy_study(federation, "pooled", study__rounds=1),
    }
    return {name: run(study, runs, workers=0).folder for name, study in studies.items()}
