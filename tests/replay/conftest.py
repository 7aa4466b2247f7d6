"""Sites of different sizes, with a case that nobody annotated at each."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.toy import write_organs

    sizes = {"ada": 3, "bea": 4, "cid": 2}
    splits = {site: ("train",) * n + ("valid", "valid", "test") for site, n in sizes.items()}
    return write_organs(tmp_path_factory.mktemp("uneven") / "organs", splits=splits, unlabelled=1)


@pytest.fixture
def smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sharp bend in the plain networks' activation: on one, a rounding error becomes another gradient."""
    from torch import nn

    from consilium.networks import plain_unet

    monkeypatch.setattr(plain_unet, "_act", nn.SiLU)
