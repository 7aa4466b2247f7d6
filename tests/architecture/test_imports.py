"""What may import what, and what is never imported: the shape of the package, held by tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import consilium

ROOT = Path(consilium.__file__).parent

# A module may import from its own layer and from layers below it (earlier in this list).
LAYERS = [
    ["errors"],
    ["machine", "children", "fields", "files", "legacy", "plugins"],
    ["randomness", "weights", "scores"],
    ["tree"],
    ["site", "data"],
    ["method", "store"],
    ["learning", "networks", "tasks", "privacy"],
    ["methods"],
    ["study"],
    ["messages", "local_norm", "hospital"],
    ["score_sheets", "policy"],
    ["intake", "outgoing"],
    ["worker", "run_folder", "admission"],
    ["site_service", "inputs"],
    ["engine"],
    ["wires"],
    [
        "federation",
        "simulation",
        "prediction",
        "describe",
        "reports",
        "reporting",
        "analysis",
        "export",
        "suites",
        "demo",
    ],
    ["cli", "__main__"],
]
# Preprocessed cases become batches, which augment: the one place where data reach up.
ALLOWED = {("data.cases", "learning")}


def modules() -> Iterator[tuple[str, Path]]:
    for path in ROOT.rglob("*.py"):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


def level(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name.split(".")[0] in layer)


def imported(path: Path) -> Iterator[str]:
    """Every module of the package that a file imports, at whatever depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "consilium" else [node.module]
        yield from (name.removeprefix("consilium.") for name in names if name.startswith("consilium."))


def test_imports_go_one_way() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, path in modules()
        if name not in ("__init__",)
        for other in imported(path)
        if not other.startswith("__") and level(other) > level(name) and (name, other.split(".")[0]) not in ALLOWED
    ]
    assert wrong == []


@pytest.mark.parametrize("name", [name for name, _ in modules()])
def test_nothing_is_unpickled(name: str) -> None:
    """Files and messages are safetensors and JSON; `torch.load`, `pickle` and friends do not occur."""
    source = (ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
            assert not {n.split(".")[0] for n in names} & {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal"}
        if isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            assert whole not in ("torch.load", "torch.save"), whole
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False


def test_only_the_federation_imports_nvflare() -> None:
    users = [name for name, path in modules() if "nvflare" in path.read_text(encoding="utf-8")]
    assert all(name.startswith(("federation", "wires.flare")) for name in users), users


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], []])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from consilium.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'monai', 'numpy', 'matplotlib', 'scipy', 'sklearn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_public_api_is_frozen() -> None:
    assert sorted(consilium.__all__) == ["METHODS", "Weights", "load_study", "resume", "run"]
    for name in consilium.__all__:
        assert getattr(consilium, name) is not None


def test_no_module_is_a_drawer_for_anything() -> None:
    forbidden = {"utils", "helpers", "common", "misc"}
    assert not [name for name, _ in modules() if name.split(".")[-1] in forbidden]
