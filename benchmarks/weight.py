"""How much code the package is: files, code lines, statements, names, classes, the length of functions.

A code line holds a token that is no comment, and is no docstring. A statement is a node of the syntax tree, docstrings
not counted; neither depends on how the formatter breaks lines, as counting lines does.
"""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from pathlib import Path

from benchmarks.measuring import Measured

PACKAGE = Path(__file__).parents[1] / "consilium"
# the package at commit 11ef288, before its files were split and joined by idea
BEFORE = {
    "files": 250,
    "code lines": 24_924,
    "statements": 20_367,
    "top-level names": 2_177,
    "classes": 434,
    "lines of a function": 8.37,
}
LIMIT = 2.0  # of what it was: more should be noticed
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def docstring(node: ast.AST) -> ast.Expr | None:
    """The docstring of a module, class or function, as the statement that it is."""
    if not isinstance(node, (ast.Module, ast.ClassDef, *_Function)) or not node.body:
        return None
    first = node.body[0]
    return first if isinstance(first, ast.Expr) and ast.get_docstring(node, clean=False) is not None else None


def code_lines(source: str) -> int:
    """Lines with code on them: no blanks, no comments alone, no docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if found := docstring(node):
            lines -= set(range(found.lineno, (found.end_lineno or found.lineno) + 1))
    return len(lines)


def statements(source: str) -> int:
    """Statements without docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    return sum(isinstance(node, ast.stmt) for node in nodes) - sum(docstring(node) is not None for node in nodes)


def weighed(folder: Path) -> dict[str, float]:
    """What `folder` holds: files, code lines, statements, top-level names, classes, mean length of a function."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    trees = [ast.parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes if isinstance(node, _Function)]
    return {
        "files": len(sources),
        "code lines": sum(map(code_lines, sources)),
        "statements": sum(map(statements, sources)),
        "top-level names": sum(len(_names(node)) for tree in trees for node in tree.body),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "lines of a function": round(statistics.fmean(lengths), 2),
    }


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.ClassDef, *_Function)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def package(folder: Path, repeats: int) -> list[Measured]:
    """The package as it is now, beside what it was."""
    return [
        Measured("weight", name, now, "before", BEFORE[name], "", now / BEFORE[name], LIMIT)
        for name, now in weighed(PACKAGE).items()
    ]
