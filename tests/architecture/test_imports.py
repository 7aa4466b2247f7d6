"""What may import what, and what is never imported: the shape of the package, held by tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

import consilium
from tests.architecture.sources import nodes, parsed

ROOT = Path(consilium.__file__).parent

# A module may import from its own layer and from layers below it (earlier in this list).
LAYERS = [
    ["errors"],
    ["machine", "children", "fields", "files", "legacy", "extensions", "tracking", "stopwatch", "wording"],
    ["randomness", "weights", "starting_weights", "scores", "ranges"],
    ["message_parsing", "tree", "tensor_tables", "packet_files", "differences", "transport"],
    ["batch", "local_training", "task", "predictor", "site", "data"],
    ["method", "timeline", "store"],
    ["learning", "networks", "tasks", "privacy"],
    ["methods"],
    ["plan", "study", "validation", "study_reading"],
    ["messages", "local_norm", "hospital", "caps", "consent", "left_log", "left_lines"],
    ["score_sheets", "policy", "hospital_policy", "budget"],
    ["intake", "outgoing"],
    ["worker", "site_opening", "run_files", "run_folder"],
    ["site_service", "inputs"],
    ["engine"],
    ["wires"],
    ["federation", "simulation", "rehearsal", "ready_studies", "training_cases", "evaluation", "test_time", "planning"],
    ["describe", "reviewing", "reports", "toy_federation", "contract", "step_timing"],
    ["dry_run"],
    ["analysis", "export", "first_study"],
    ["audit", "prediction", "suites"],
    ["reporting", "finished_run"],
    ["demo", "watching"],
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
    for node in nodes(path.read_text(encoding="utf-8")):
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


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The groups of nodes that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for other in graph.get(todo.pop(), set()) - seen:
                seen.add(other)
                todo.append(other)
        return seen

    reach = {node: reached(node) for node in graph}
    found = {frozenset({node, *(o for o in reach[node] if node in reach.get(o, set()))}) for node in graph}
    return {group for group in found if len(group) > 1}


def test_no_part_of_a_layer_imports_in_a_circle() -> None:
    """Within a layer too, the top one included: packages and modules can be understood one after the other."""
    graph: dict[str, set[str]] = {}
    for name, path in modules():
        part = name.split(".")[0]
        others = {other.split(".")[0] for other in imported(path)}
        graph.setdefault(part, set()).update(o for o in others - {part} if not o.startswith("__"))
    graph["data"] -= {"learning"}  # ALLOWED
    assert circles(graph) == set()


def imported_at_once(path: Path, names: Container[str]) -> Iterator[str]:
    """The modules that importing a file imports: not those inside functions, nor those for a type checker."""
    for node in parsed(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module in names:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in names else str(node.module) for name in inside)


def test_no_two_modules_wait_for_each_other() -> None:
    names = {f"consilium.{name}".removesuffix(".__init__"): path for name, path in modules()}
    graph = {name: set(imported_at_once(path, names)) - {name, "consilium"} for name, path in names.items()}
    assert circles(graph) == set()


def test_a_circle_would_be_noticed() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {frozenset({"b", "c"})}


UNSAFE = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle", "jsonpickle"}
RUNS_CODE = {"load", "save", "serialization", "hub", "package"}  # of torch, however they are imported


def unpickling(source: str) -> list[str]:
    """What in a source could read objects that run code: by import, by attribute, or under another name."""
    torches = {"torch"}
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            torches |= {alias.asname for alias in node.names if alias.name == "torch" and alias.asname}
            found += [a.name for a in node.names if a.name.split(".")[0] in UNSAFE]
            found += [
                a.name for a in node.names if a.name.split(".")[0] == "torch" and a.name.split(".")[-1] in RUNS_CODE
            ]
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found += [module] if module.split(".")[0] in UNSAFE else []
            if module.split(".")[0] == "torch":
                found += [f"{module}.{a.name}" for a in node.names if {a.name, module.split(".")[-1]} & RUNS_CODE]
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found += [] if isinstance(node.value, ast.Constant) and node.value.value is False else ["allow_pickle"]
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in torches:
            found += [ast.unparse(node)] if node.attr in RUNS_CODE else []
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id == "getattr" and ast.unparse(node.args[0]) in torches:
            named = node.args[1]
            found += [ast.unparse(node)] if isinstance(named, ast.Constant) and named.value in RUNS_CODE else []
    return found


def test_nothing_is_unpickled() -> None:
    """Files and messages are safetensors and JSON; `torch.load`, `pickle` and friends do not occur."""
    found = {name: unpickling(path.read_text(encoding="utf-8")) for name, path in modules()}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "from torch import load as read",
        "import torch as t\nt.load('x')",
        "from torch.serialization import load",
        "from torch import serialization",
        "import torch\ngetattr(torch, 'load')('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_unpickling_would_be_noticed(source: str) -> None:
    assert unpickling(source)


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
    public = ["METHODS", "Weights", "evaluate", "load_study", "open_run", "predict", "resume", "run"]
    assert dir(consilium) == sorted(consilium.__all__) == public
    for name in consilium.__all__:
        assert getattr(consilium, name) is not None


def test_no_module_is_a_drawer_for_anything() -> None:
    forbidden = {"utils", "helpers", "common", "misc"}
    assert not [name for name, _ in modules() if name.split(".")[-1] in forbidden]
