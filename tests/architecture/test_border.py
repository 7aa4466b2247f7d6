"""The border between what trains and deploys and what only reproduces papers: what a hospital installs stays small.

Imports are followed from the modules that a site process or a server process starts with, those inside functions
included. What only a type checker reads is not followed, nor are the lazy names of `import consilium`: no process
asks for them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import consilium
from benchmarks.weight import code_lines
from tests.architecture.sources import parsed

ROOT = Path(consilium.__file__).parent
PROCESSES = ("federation.start", "federation.supervisor", "federation.site_entry", "federation.server_entry")
PROCESSES += ("federation.site_job", "federation.server_job", "worker")  # and every wire
REPRODUCTION = (  # what only makes, shows or repeats experiments
    "analysis",
    "audit",
    "contract",
    "data.importers",
    "data.partition",
    "data.phantoms",
    "demo",
    "ready_studies",
    "reporting",
    "reports",
    "suites",
    "toy_federation",
)
SHARE = 0.6  # of the package's code lines, counted by `benchmarks.weight.code_lines`


def named(root: Path) -> dict[str, str]:
    """The source of every module of a package by its name; a package itself ends with `__init__`."""
    paths = sorted(root.rglob("*.py"))
    return {".".join(p.relative_to(root).with_suffix("").parts): p.read_text(encoding="utf-8") for p in paths}


def running(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one that may run: not what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from running(child)


def imported(source: str, package: str) -> Iterator[str]:
    """What a source imports of the package: modules, names in them, and the packages around them."""
    for node in running(parsed(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if f"{name}.".startswith(f"{package}."):
                parts = name.split(".")[1:]
                yield ".".join(parts)
                yield from (".".join([*parts[:i], "__init__"]) for i in range(len(parts) + 1))


def reached(modules: Mapping[str, str], start: Iterator[str], package: str = "consilium") -> set[str]:
    """All modules that importing these can lead to."""
    seen: set[str] = set()
    todo = list(start)
    while todo:
        name = todo.pop()
        if name in modules and name not in seen:
            seen.add(name)
            todo += imported(modules[name], package)
    return seen


def of_processes(modules: Mapping[str, str]) -> set[str]:
    wires = [name for name in modules if name.startswith("wires.")]
    return reached(modules, iter((*PROCESSES, *wires)))


def test_processes_import_nothing_that_only_reproduces_papers() -> None:
    found = of_processes(named(ROOT))
    assert sorted(name for name in found if f"{name}.".startswith(tuple(f"{part}." for part in REPRODUCTION))) == []


def test_processes_can_import_at_most_three_fifths_of_the_package() -> None:
    modules = named(ROOT)
    sizes = {name: code_lines(source) for name, source in modules.items()}
    reachable = sum(sizes[name] for name in of_processes(modules))
    assert reachable <= SHARE * sum(sizes.values()), f"{reachable} of {sum(sizes.values())} code lines"


def test_the_declared_modules_are_there() -> None:
    modules = named(ROOT)
    assert [name for name in PROCESSES if name not in modules] == []
    assert [part for part in REPRODUCTION if part not in modules and f"{part}.__init__" not in modules] == []


def test_imports_inside_functions_are_followed_and_those_for_type_checkers_are_not(tmp_path: Path) -> None:
    files = {
        "__init__": "",
        "start": "def go():\n    from mine.part import deep\n    deep.go()\n",
        "part/__init__": "",
        "part/deep": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mine.typed\nimport mine.last\n",
        "typed": "import mine.lost\n",
        "last": "",
        "lost": "",
    }
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    found = reached(named(tmp_path), iter(["start"]), "mine")
    assert found == {"__init__", "start", "part.__init__", "part.deep", "last"}


def test_docstrings_comments_and_blank_lines_are_not_code() -> None:
    source = (
        '"""One.\n\nTwo."""\n\n# why\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """Three."""\n    return """a\nb"""\n'
    )
    assert code_lines(source) == 6  # x and its two lines, def, return and the line its text goes on
