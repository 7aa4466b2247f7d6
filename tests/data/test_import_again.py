"""An import that was stopped goes on where it was, and ends as if it had not been stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from consilium.data.formats import ImageError
from consilium.data.importers import import_found, writing
from consilium.data.importers.found import RawCase
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.writing import Writing
from consilium.errors import DataError
from tests.cli.terminal import call

CASES = 6
HOW = ImportOptions(images="i/{case}.png", masks=("m/{case}.png",), labels=("disc",), values=("255=disc",))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    for i in range(CASES):
        for kind, value in (("i", 10 * i), ("m", 255)):
            picture = np.zeros((12, 10), np.uint8)
            picture[3:7, 2:8] = value
            path = tmp_path / "raw" / kind / f"c{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(path)
    return tmp_path / "raw"


def stop(done: int, total: int) -> None:
    if done == 4:
        raise KeyboardInterrupt


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cases that are read."""
    names: list[str] = []
    real = writing.read_case
    monkeypatch.setattr(writing, "read_case", lambda case, *more: (names.append(case.name), real(case, *more))[1])
    return names


def test_a_stopped_import_goes_on(raw: Path, tmp_path: Path, read: list[str]) -> None:
    import_found("folder", [raw], tmp_path / "whole", HOW)
    with pytest.raises(KeyboardInterrupt):
        import_found("folder", [raw], tmp_path / "to", HOW, progress=stop)
    assert not (tmp_path / "to").exists()
    read.clear()
    import_found("folder", [raw], tmp_path / "to", HOW)
    assert set(read) <= {"c4", "c5"}
    assert files(tmp_path / "to") == files(tmp_path / "whole")
    assert not list(tmp_path.glob(".*partial"))


def test_ctrl_c_at_the_command_keeps_what_is_done(
    raw: Path, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command turns Ctrl-C into an exception of its own."""
    real = writing.WrittenCases.add

    def add(self: writing.WrittenCases, case: RawCase, *more: Any) -> None:
        real(self, case, *more)
        if case.name == "c3":
            signal.raise_signal(signal.SIGINT)

    words = ["--images", "i/{case}.png", "--masks", "m/{case}.png", "--labels", "x", "--values", "255=x"]
    command = ["import", "folder", raw, "--to", tmp_path / "to", *words]
    with monkeypatch.context() as patch:
        patch.setattr(writing.WrittenCases, "add", add)
        stopped = call(*command)
    assert (stopped.status, "the same command continues" in stopped.err) == (130, True)
    read.clear()
    assert call(*command).status == 0
    assert set(read) <= {"c4", "c5"}


def test_ctrl_c_while_the_splits_are_drawn_keeps_the_cases_too(
    raw: Path, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writing, "draw_splits", stops)
        with pytest.raises(KeyboardInterrupt):
            import_found("folder", [raw], tmp_path / "to", HOW)
    assert len(read) == CASES
    import_found("folder", [raw], tmp_path / "to", HOW)
    assert len(read) == CASES and not [name for name in files(tmp_path / "to") if name.startswith(".")]


def test_what_a_killed_process_wrote_is_taken_over(raw: Path, tmp_path: Path, read: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        import_found("folder", [raw], tmp_path / "to", HOW, progress=stop)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (left,) = tmp_path.glob(".*partial")
    left.rename(tmp_path / f".to.{gone.pid}.partial")
    read.clear()
    import_found("folder", [raw], tmp_path / "to", HOW)
    assert set(read) <= {"c4", "c5"} and len(list((tmp_path / "to").rglob("*.png"))) == 2 * CASES


def stopped(raw: Path, to: Path, process: int | None = None) -> Path:
    """What an import leaves that was stopped, by a process that is gone if no other is named."""
    with pytest.raises(KeyboardInterrupt):
        import_found("folder", [raw], to, HOW, progress=stop)
    (left,) = to.parent.glob(f".{to.name}.{os.getpid()}*partial")
    if process is None:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        process = gone.pid
    return left.rename(to.with_name(f".{to.name}.{process}.partial"))


@pytest.mark.parametrize("other", ["sources", "options", "rules"])
def test_nothing_of_another_import_is_taken_over(raw: Path, tmp_path: Path, other: str) -> None:
    """Its images had no row in the tables, and stayed in the folder."""
    source, options, how = raw, HOW, Writing()
    if other == "sources":
        source = tmp_path / "second"
        for kind in ("i", "m"):
            (source / kind).mkdir(parents=True)
            (source / kind / "only.png").write_bytes((raw / kind / "c1.png").read_bytes())
    elif other == "options":
        options = replace(HOW, site="elsewhere")
    else:
        how = Writing(reference=True)
    left = stopped(raw, tmp_path / "to")
    import_found("folder", [source], tmp_path / "whole", options, how)
    import_found("folder", [source], tmp_path / "to", options, how)
    assert files(tmp_path / "to").keys() == files(tmp_path / "whole").keys()
    assert not left.exists()


def test_what_is_gone_from_the_sources_is_not_in_the_folder(raw: Path, tmp_path: Path) -> None:
    stray = stopped(raw, tmp_path / "to") / "north" / "images" / "x.png"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"whose?")
    for kind in ("i", "m"):
        (raw / kind / "c0.png").unlink()
    import_found("folder", [raw], tmp_path / "to", HOW)
    import_found("folder", [raw], tmp_path / "whole", HOW)
    assert files(tmp_path / "to") == files(tmp_path / "whole")
    assert not (tmp_path / "to" / "north").exists()


def test_a_case_left_out_leaves_no_image(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image is written before the mask fails."""
    real = writing.write_mask

    def fails_at_c2(mask: Any, like: Any, path: Path) -> Path:
        if path.name == "c2":
            raise ImageError(path, "cannot be drawn")
        return real(mask, like, path)

    monkeypatch.setattr(writing, "write_mask", fails_at_c2)
    import_found("folder", [raw], tmp_path / "to", HOW, Writing(yes=True))
    assert {path.stem for path in (tmp_path / "to").rglob("*.png")} == {"c0", "c1", "c3", "c4", "c5"}


@pytest.mark.parametrize("whose", ["another computer", "a running process", "nobody knows", "another folder"])
def test_what_may_be_in_use_is_left_alone(raw: Path, tmp_path: Path, read: list[str], whose: str) -> None:
    target = tmp_path / ("to.2" if whose == "another folder" else "to")
    left = stopped(raw, target, process=os.getppid() if whose == "a running process" else None)
    if whose == "another computer":
        told = json.loads((left / ".owner.json").read_text())
        (left / ".owner.json").write_text(json.dumps({**told, "host": "ward-7"}))
        left = left.rename(tmp_path / f".to.{os.getpid()}.partial")  # it may have a process of our number
    elif whose == "nobody knows":
        (left / ".owner.json").unlink()
    before = files(left)
    read.clear()
    import_found("folder", [raw], tmp_path / "to", HOW)
    assert len(read) == CASES and files(left) == before
    assert not [name for name in files(tmp_path / "to") if name.startswith(".")]


def test_a_case_that_changed_is_written_again(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        import_found("folder", [raw], tmp_path / "to", HOW, progress=stop)
    Image.fromarray(np.full((12, 10), 77, np.uint8)).save(raw / "i/c0.png")
    (left,) = tmp_path.glob(".*partial")
    next(left.rglob("labels/c1.png")).write_bytes(b"cut")
    import_found("folder", [raw], tmp_path / "to", HOW)
    assert np.asarray(Image.open(next((tmp_path / "to").rglob("images/c0.png")))).max() == 77
    assert np.asarray(Image.open(next((tmp_path / "to").rglob("labels/c1.png")))).max() == 1


def test_a_doubt_leaves_nothing(raw: Path, tmp_path: Path) -> None:
    (raw / "m/c5.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="--yes"):
        import_found("folder", [raw], tmp_path / "to", HOW)
    assert {path.name for path in tmp_path.iterdir()} == {"raw"}
    import_found("folder", [raw], tmp_path / "to", HOW, Writing(yes=True))
    assert len(list((tmp_path / "to").rglob("images/*.png"))) == CASES - 1
