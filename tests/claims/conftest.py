"""Where runs of claims are kept, and how their figures are told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.claims.told import Tell


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs are kept."""
    given = os.environ.get("CONSILIUM_CLAIMS")
    folder = Path(given).resolve() if given else tmp_path_factory.mktemp("claims")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def tell(place: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Tell:
    """Figures go to the terminal and into a file, in place of the test's earlier ones, whether a claim holds or not."""
    file, name = place / "figures.txt", request.node.name
    earlier = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    kept = [line for line in earlier if not line.startswith(f"{name}: ")]
    file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}")
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{name}: {text}\n")

    return say
