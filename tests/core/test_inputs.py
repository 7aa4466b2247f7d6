"""A run's result is never given for other data or other plug-in files than it was made from."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from consilium import simulation
from consilium.contract import Interrupted, crash_after, run_in_process
from consilium.data import cache_pieces
from consilium.errors import RunError
from consilium.extensions import code_hashes
from consilium.inputs import current_inputs, place_of
from consilium.run_files.origin import differences
from consilium.run_folder import RunFolder
from consilium.study import Study
from consilium.suites.running import outlook, run_suite
from tests.suites.bench import Teller, write_suite
from tests.toy import toy_study

PLUGIN = """
from dataclasses import dataclass

from consilium.methods.fedprox import FedProx
from strength_of_toy import STRENGTH


@dataclass(frozen=True)
class Mine(FedProx):
    strength: float = STRENGTH
"""


@pytest.fixture
def own(federation: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(federation, tmp_path / "own"))


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A method of the user's own, which imports a file beside it."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "toy_method.py").write_text(PLUGIN)
    (folder / "strength_of_toy.py").write_text("STRENGTH = 0.1\n")
    monkeypatch.syspath_prepend(str(folder))
    for name in ("toy_method", "strength_of_toy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return folder


def blank(own: Path) -> None:
    for path in (own / "ada/labels").iterdir():
        Image.fromarray(np.zeros((16, 16), np.uint8)).save(path)


def drop_a_case(own: Path) -> None:
    table = own / "bea/cases.csv"
    table.write_text("".join(table.read_text().splitlines(True)[:-1]))


def swap_splits(own: Path) -> None:
    table = own / "cid/cases.csv"
    table.write_text(table.read_text().replace(",valid,", ",x,").replace(",test,", ",valid,").replace(",x,", ",test,"))


def drop_a_site(own: Path) -> None:
    shutil.rmtree(own / "cid")


CHANGES = [
    (blank, "site 'ada' has other images or masks"),
    (drop_a_case, r"site 'bea' has other cases \(17, it had 18\)"),
    (swap_splits, "site 'cid' has other cases, patients or splits"),
    (drop_a_site, "site 'cid' is gone"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_finished_run_of_other_data_is_refused_and_made_again(
    change: Any, words: str, own: Path, tmp_path: Path
) -> None:
    study = toy_study(own, study__rounds=1)
    first = simulation.run(study, tmp_path / "runs", workers=0)
    before = {path.name: path.read_bytes() for path in first.folder.iterdir() if path.is_file()}
    assert simulation.run(study, tmp_path / "runs", workers=0).folder == first.folder  # nothing has changed
    change(own)
    study = toy_study(own, study__rounds=1)
    with pytest.raises(RunError, match=f"{words}.*--again"):
        simulation.run(study, tmp_path / "runs", workers=0)
    second = simulation.run(study, tmp_path / "runs", workers=0, again=True)
    assert second.folder.name == f"{first.folder.name}-2"
    assert {name: (first.folder / name).read_bytes() for name in before} == before
    assert simulation.run(study, tmp_path / "runs", workers=0).folder == second.folder


def test_a_run_whose_data_came_back_is_found_again(own: Path, tmp_path: Path) -> None:
    study, runs = toy_study(own, study__rounds=1), tmp_path / "runs"
    first = simulation.run(study, runs, workers=0).folder
    table = (own / "bea/cases.csv").read_text()
    drop_a_case(own)
    second = simulation.run(study, runs, workers=0, again=True).folder
    (own / "bea/cases.csv").write_text(table)
    assert simulation.run(study, runs, workers=0).folder == first != second
    assert simulation.run(study, runs, workers=0, again=True).folder.name == f"{first.name}-3"  # asked for


def test_looking_whether_anything_changed_decodes_and_makes_nothing(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = toy_study(own, study__rounds=1)
    done = simulation.run(study, tmp_path / "runs", workers=0).folder
    monkeypatch.setenv("CONSILIUM_CACHE", str(tmp_path / "empty"))  # the cache was deleted meanwhile
    monkeypatch.setattr(cache_pieces, "examine", None)
    assert simulation.run(study, tmp_path / "runs", workers=0).folder == done
    assert list((tmp_path / "empty/arrays").iterdir()) == []


def test_a_run_of_0_1_without_plug_in_hashes_is_not_called_changed(own: Path, tmp_path: Path) -> None:
    study = toy_study(own, study__rounds=1)
    done = simulation.run(study, tmp_path / "runs", workers=0).folder
    facts = json.loads((done / "origin.json").read_text())
    del facts["plugins"]
    (done / "origin.json").write_text(json.dumps(facts))
    assert differences(done, {**current_inputs(study), "plugins": {"a.py": "1"}}) == []


# ---------------------------------------------------------------------------------------------- plug-ins


def mine(own: Path, **more: Any) -> Study:
    for name in ("toy_method", "strength_of_toy"):
        sys.modules.pop(name, None)  # as in a new process
    importlib.invalidate_caches()
    return toy_study(own, "toy_method:Mine", study__rounds=2, study__score_every=1, **more)


@pytest.mark.parametrize("file", ["toy_method.py", "strength_of_toy.py"])
def test_an_edited_plug_in_is_noticed_by_run_and_resume(own: Path, plugin: Path, tmp_path: Path, file: str) -> None:
    runs = tmp_path / "runs"
    done = simulation.run(mine(own), runs, workers=0).folder
    with pytest.raises(Interrupted):
        run_in_process(mine(own, study__seed=1), tmp_path / "cut", crash_after("round", 1))
    (cut,) = (tmp_path / "cut").iterdir()
    (plugin / file).write_text((plugin / file).read_text() + "# a line more\n")
    with pytest.raises(RunError, match=f"the plug-in file {file} has changed.*--again"):
        simulation.run(mine(own), runs, workers=0)
    with pytest.raises(RunError, match=f"the plug-in file {file} has changed"):
        simulation.resume(cut, workers=0)
    assert simulation.run(mine(own), runs, workers=0, again=True).folder.name == f"{done.name}-2"


def test_an_edited_preprocessing_step_is_not_taken_for_other_images(own: Path, tmp_path: Path) -> None:
    """Its code is part of what the arrays are made from, so every site's arrays are others."""
    file = tmp_path / "step.py"
    file.write_text("def same(array, spacing):\n    return array\n")
    study = toy_study(own, study__rounds=1, preprocess__steps=[f"{file}:same"])
    done = simulation.run(study, tmp_path / "runs", workers=0).folder
    file.write_text(file.read_text() + "# a line more\n")
    assert differences(done, current_inputs(study)) == [
        *(f"site '{site}' has other images, masks or preprocessing" for site in ("ada", "bea", "cid")),
        "the plug-in file step.py has changed",
    ]


def test_files_of_a_package_are_followed_and_installed_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "toypack/__init__.py": "",
        "toypack/deep/__init__.py": "from . import beside\n",
        "toypack/deep/net.py": "import json\nimport numpy\nfrom ..parts import block\nfrom consilium import METHODS\n",
        "toypack/deep/beside.py": "",
        "toypack/parts/__init__.py": "",
        "toypack/parts/block.py": "def late():\n    import toypack.parts.last\n",
        "toypack/parts/last.py": "",
        "toypack/unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    found = code_hashes(["fedavg", "toypack.deep.net:Net"])
    assert sorted(files.keys() - found.keys()) == ["toypack/unused.py"]
    assert found.keys() <= files.keys()
    for name in [name for name in sys.modules if name.startswith("toypack")]:
        monkeypatch.delitem(sys.modules, name)


# ---------------------------------------------------------------------------------------------- suites, stubs


def test_a_suite_trains_rows_of_other_data_anew(own: Path, tmp_path: Path) -> None:
    file = write_suite(tmp_path / "suite", own, 'methods = ["fedavg"]\nseeds = [0]')
    first = run_suite(file, tmp_path / "runs", workers=0)
    old = first.to_json()["tables"]
    drop_a_case(own)
    blank(own)
    assert [prospect.state for prospect in outlook(file, tmp_path / "runs")] == ["to do"]
    teller = Teller()
    second = run_suite(file, tmp_path / "runs", workers=0, watch=teller)
    assert second.to_json()["tables"] != old
    assert any("is not used" in text and "site 'ada' has other images" in text for text in teller.words)
    names = sorted(path.name for path in (tmp_path / "runs").iterdir() if (path / "summary.json").exists())
    assert len(names) == 2 and names[1] == f"{names[0]}-2"
    assert [prospect.state for prospect in outlook(file, tmp_path / "runs")] == ["done"]


def test_what_was_stopped_before_it_began_is_used_again(own: Path, tmp_path: Path) -> None:
    study = toy_study(own)
    stub = RunFolder.create(study, tmp_path).path
    assert place_of(study, tmp_path).path == place_of(study, tmp_path, again=True).path == stub
