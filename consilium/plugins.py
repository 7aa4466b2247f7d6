"""The files that a study's own classes (`package.module:Class`) are written in."""

from __future__ import annotations

import ast
import hashlib
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

_INSTALLED = ("site-packages", "dist-packages")


def plugin_hashes(names: Iterable[str]) -> dict[str, str]:
    """A hash of every file that classes named `package.module:Class` come from, by its path below their root.

    Files that they import beside them, or from their own package, are among them; installed packages are not. Names
    without ":" are the project's own.
    """
    found: dict[str, str] = {}
    for name in names:
        module = name.partition(":")[0]
        file = getattr(importlib.import_module(module), "__file__", None) if ":" in name else None
        if file is not None:
            root = _root(Path(file).resolve(), module)
            found |= {str(path.relative_to(root)): _hash(path) for path in _with_imports(module, root)}
    return dict(sorted(found.items()))


def _root(file: Path, module: str) -> Path:
    """The folder that the module's full name starts from."""
    depth = module.count(".") + (file.name == "__init__.py")
    return file.parents[depth]


def _with_imports(module: str, root: Path) -> list[Path]:
    seen: set[Path] = set()
    todo = _places(module, root)
    while todo:
        name, path = todo.pop()
        if path not in seen:
            seen.add(path)
            for other in _imported(name, path):
                todo += _places(other, root) if _is_own(other, module, root) else []
    return list(seen)


def _is_own(name: str, module: str, root: Path) -> bool:
    top = name.partition(".")[0]
    return top == module.partition(".")[0] or (root.name not in _INSTALLED and top != "consilium")


def _imported(module: str, path: Path) -> Iterator[str]:
    """Every module a file may import, also inside functions; `from a import b` may name the module a.b."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # importing it says why
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _places(name: str, root: Path) -> list[tuple[str, Path]]:
    """The file of a module below the root, and those of the packages around it, each with its module's name."""
    parts = name.split(".") if name else []
    files = [(".".join(parts[:n]), root.joinpath(*parts[:n], "__init__.py")) for n in range(1, len(parts) + 1)]
    if parts:
        files.append((name, root.joinpath(*parts[:-1], f"{parts[-1]}.py")))
    return [(module, file) for module, file in files if file.is_file()]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
