"""Runs to audit, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from consilium.simulation import run
from tests.audit.noise import overfitted, write_noise
from tests.toy import toy_study


@pytest.fixture(scope="session")
def memorised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model knows its 24 training cases by heart."""
    folder = tmp_path_factory.mktemp("memorised")
    return overfitted(write_noise(folder / "federation", 0, 24, 12, 24), folder / "runs", epochs=30)


@pytest.fixture(scope="session")
def taught(organs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of UFPS: one round of teachers, one of the common model."""
    study = toy_study(organs, "ufps", study__rounds=1, method__teacher_rounds=1)
    return run(study, tmp_path_factory.mktemp("taught"), workers=0).folder
