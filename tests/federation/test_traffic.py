"""No case's name, path or pixel leaves a hospital: everything it sends and everything the server keeps is searched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from consilium.messages import AnswerHead
from tests.federation.conftest import Running
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(900)]


def secrets_of(site: Path) -> dict[str, bytes]:
    """What must not be found: names, paths, and rows of pixels as they are stored and as training sees them."""
    found = {"the folder": str(site).encode(), "the table": b"cases.csv", "the folder of images": b"images/"}
    for path in sorted((site / "images").iterdir()):
        pixels = np.asarray(Image.open(path))
        found[f"the name {path.stem}"] = path.stem.encode()
        found[f"the file {path.stem}"] = path.read_bytes()[40:72]
        for row in (4, 8):
            found[f"row {row} of {path.stem}"] = pixels[row].tobytes()
            found[f"row {row} of {path.stem}, prepared"] = (pixels[row] / 255).astype(np.float32).tobytes()
    return found


@pytest.mark.slow
def test_nothing_of_a_case_is_in_what_a_site_sends_or_the_server_keeps(
    running: Running, federation: Path, tmp_path: Path
) -> None:
    study = toy_study(federation, "fedsm", study__name="overheard", study__deadline=60.0)
    running.restart("ada", f"listen:{tmp_path}")
    try:
        running.admin.submit(study)
        run = running.finished(study)
    finally:
        running.restart("ada")
    heard = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("*.frames")))
    secrets = secrets_of(federation / "ada")
    assert AnswerHead.__qualname__.encode() in heard  # one did hear it; an answer does not name its run
    assert len(heard) > 3 * (running.local.memory("ada") / run.name / "release.safetensors").stat().st_size / 4
    assert not [what for what, secret in secrets.items() if secret in heard]
    kit = running.local.kits["server"]
    kept = {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()}
    assert any(run.name in str(path) for path in kept)
    names = {what: secret for what, secret in secrets.items() if secret not in (b"images/", b"cases.csv")}
    assert not [(path.name, what) for path, text in kept.items() for what, secret in names.items() if secret in text]
