"""The notebooks run from top to bottom and hold their outputs."""

from __future__ import annotations

import ast
import importlib
import json
import os
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def test_there_are_two_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_federation", "your_own_data"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored_and_name_no_folder_of_a_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert sum(bool(cell["outputs"]) for cell in cells) >= 5
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [word for word in ("/home/", "/root/", "/tmp/", "Traceback") if word in text]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_of_the_package_is_there(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    plain = "\n".join(line for cell in cells for line in "".join(cell["source"]).splitlines() if line[:1] not in "!%")
    found = [node for node in ast.walk(ast.parse(plain)) if isinstance(node, ast.ImportFrom)]
    ours = [
        (node.module, name.name) for node in found if str(node.module).startswith("consilium") for name in node.names
    ]
    assert ours
    assert [pair for pair in ours if not hasattr(importlib.import_module(str(pair[0])), pair[1])] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    stored = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    client.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    made = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert [len(outputs) > 0 for outputs in made] == [len(outputs) > 0 for outputs in stored]
