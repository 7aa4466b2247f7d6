"""Sources read as syntax trees, once for all tests of a process."""

from __future__ import annotations

import ast
from functools import cache


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Every node of a source's tree."""
    return tuple(ast.walk(parsed(source)))
