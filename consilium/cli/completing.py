"""What a shell offers when a word is half typed: methods, ready studies, run folders. Nothing here imports torch."""

from __future__ import annotations

import ast
from importlib import resources
from pathlib import Path

MOST = 200  # suggestions


def methods(incomplete: str) -> list[str]:
    """The names of methods, read from the list without importing it, which takes seconds."""
    source = (resources.files("consilium") / "methods" / "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == "METHODS"
            and isinstance(node.value, ast.Dict)
        ):
            names = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            return [str(name) for name in names if str(name).startswith(incomplete)]
    return []


def studies(incomplete: str) -> list[str]:
    """The studies and suites of the package."""
    from consilium.ready_studies import ready_studies

    return [name for name in ready_studies() if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Run folders whose path begins so, at most one folder further down; the shell completes other paths itself."""
    typed = Path(incomplete)
    above, begun = (typed, "") if incomplete.endswith("/") or not incomplete else (typed.parent, typed.name)
    patterns = (f"{begun}*/study.toml", f"{begun}*/*/study.toml")
    found = sorted({str(file.parent) for pattern in patterns for file in above.glob(pattern)})
    return [path for path in found if path.startswith(incomplete)][:MOST]
