"""A user's own code: networks, losses, augmentations, scores, preprocessing steps and methods that a study names.

A study names code as `file.py:Name`, a file beside the study, or as `package.module:Name`. An installed package can
also register short names by entry points. Nothing is imported before its name is looked up here.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from consilium.errors import StudyError
from consilium.fields import nearest

_INSTALLED = ("site-packages", "dist-packages")
PLACES = (("method", "name"), ("task", "network"), ("task", "loss"), ("task", "augment"), ("task", "scores"),
          ("preprocess", "steps"))  # fmt: skip
Tables = Mapping[str, Any]


def is_code(name: object) -> bool:
    """Whether a value of a study names code that is not the project's own."""
    return isinstance(name, str) and ":" in name


def named_code(tables: Tables) -> tuple[str, ...]:
    """The code that a study's tables name, as `file.py:Name` or `package.module:Name`, each once."""
    found: dict[str, None] = {}

    def note(name: str) -> str:
        found[name] = None
        return name

    _renamed(_by_entry_points(tables), note)
    return tuple(found)


def located(tables: Tables, beside: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Study tables with the full path of every file of code, and the files: their names in the study → full paths.

    A file is where the table [code] says, else in the working folder, else in `beside`, the study's own folder.
    Raises StudyError if the file does not exist.
    """
    files: dict[str, str] = {}
    known = tables.get("code", {})

    def full(name: str) -> str:
        file, _, attribute = name.partition(":")
        if not file.endswith(".py"):
            return name
        folders = [folder for folder in (Path.cwd(), beside) if folder is not None]
        choices = [Path(str(known[file]))] if file in known else []  # else where a package keeps it
        choices += [folder / file for folder in folders] + [folder / Path(file).name for folder in folders]
        path = next((choice.resolve() for choice in choices if choice.is_file()), None)
        if path is None:
            raise StudyError(f"the study names {name}, and there is no file {file} here or beside the study.")
        files[file] = str(path)
        return f"{path}:{attribute}"

    return _renamed(_by_entry_points(tables), full), files


def shortened(tables: Tables, files: Mapping[str, str]) -> dict[str, Any]:
    """Study tables with every file of code named as in the study: the inverse of `located`."""
    short = {path: file for file, path in files.items()}

    def name_in_study(name: str) -> str:
        path, _, attribute = name.rpartition(":")
        return f"{short.get(path, path)}:{attribute}"

    return _renamed(tables, name_in_study)


def _renamed(tables: Tables, change: Callable[[str], str]) -> dict[str, Any]:
    """Study tables in which `change` was applied to every name of code."""
    new = dict(tables)
    for section, key in PLACES:
        table = new.get(section)
        if not isinstance(table, Mapping) or key not in table:
            continue
        value = table[key]
        if is_code(value):
            new[section] = {**table, key: change(value)}
        elif isinstance(value, list | tuple):
            new[section] = {**table, key: [change(item) if is_code(item) else item for item in value]}
    return new


def _by_entry_points(tables: Tables) -> dict[str, Any]:
    """Study tables in which registered short names are replaced by the code that they name."""
    new = dict(tables)
    for section, key in (("method", "name"), ("task", "network"), ("task", "loss")):
        table = new.get(section)
        if isinstance(table, Mapping) and isinstance(table.get(key), str) and not is_code(table[key]):
            found = registered(f"{section}s" if section == "method" else f"{key}{'es' if key == 'loss' else 's'}")
            if table[key] in found:
                new[section] = {**table, key: found[table[key]]}
    return new


@cache  # reading the metadata of every installed package costs more than loading a study
def registered(kind: str) -> Mapping[str, str]:
    """What installed packages register in the entry-point group `consilium.<kind>`: short name → package.module:Name.

    Kinds are "methods", "networks" and "losses". Packages are looked at once per process.
    """
    return {point.name: point.value for point in entry_points(group=f"consilium.{kind}")}


def code_id(name: str) -> str:
    """The name of code that is the same on every machine: the file without its folder, and the name in it."""
    file, _, attribute = name.rpartition(":")
    return f"{Path(file).name if file.endswith('.py') else file}:{attribute}"


def file_of(name: str) -> str:
    """The file or module of `file.py:Name` or `package.module:Name`, as it is written there."""
    return name.rpartition(":")[0]


def load(name: str, section: str = "method") -> Any:
    """Import what `path/file.py:Name` or `package.module:Name` names; StudyError if that fails."""
    module, _, attribute = name.rpartition(":")
    try:
        found = _from_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except Exception as error:  # the user's file may raise anything
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise StudyError(f"[{section}] cannot import {name}: {reason}{_place(error, module)}.") from error
    if not hasattr(found, attribute):
        own = [key for key, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__]
        hint = nearest(attribute, own) if own else "it defines nothing."
        raise StudyError(f"[{section}] cannot import {name}: there is no {attribute!r} in it; {hint}")
    return getattr(found, attribute)


def _place(error: Exception, module: str) -> str:
    """The line of a file that raised."""
    frames = traceback.extract_tb(error.__traceback__) if module.endswith(".py") else ()
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == Path(module).name]
    return f" (line {lines[-1]})" if lines else ""


def _from_file(path: Path) -> Any:
    """The module in a file; imported again when the file has changed. It can import files beside it."""
    path = path.resolve()
    # the content is part of the name: two files of one name, and two states of one file, are different modules
    name = f"consilium_own_{hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module by name
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def code_hashes(names: Iterable[str]) -> dict[str, str]:
    """A hash of every file that the named code is written in, by its path below its root. Nothing is imported.

    This includes files that they import from the same folder or package, but not installed packages. Names without ":"
    are the project's own.
    """
    return {path: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for path, file in code_files(names).items()}


def code_files(names: Iterable[str]) -> dict[str, Path]:
    """The files of `code_hashes`, by their path below their root."""
    found: dict[str, Path] = {}
    for name in names:
        module = name.rpartition(":")[0]
        file = _file_of(module) if module else None
        if file is not None:
            module = file.stem if module.endswith(".py") else module
            root = file.parent if module == file.stem else _root(file, module)
            found |= {str(path.relative_to(root)): path for path in _with_imports(module, root)}
    return dict(sorted(found.items()))


def code_hash(name: str) -> str:
    """One hash of all files of the named code; a hospital allows code by this hash."""
    return hashlib.sha256(repr(sorted(code_hashes([name]).items())).encode()).hexdigest()[:32]


def _file_of(module: str) -> Path | None:
    """The file of a module, found without importing it."""
    if module.endswith(".py"):
        path = Path(module)
        return path.resolve() if path.is_file() else None
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).resolve()
    if not rest:
        return place
    folder = place.parent.joinpath(*rest)
    choices = (folder / "__init__.py", folder.with_suffix(".py"))
    return next((choice for choice in choices if choice.is_file()), None)


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
        return  # the import reports the error
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
