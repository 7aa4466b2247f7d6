"""How long the command takes to say what it can do."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.measuring import Measured

SECONDS = 0.5


def help_page(folder: Path, repeats: int) -> list[Measured]:
    """`consilium --help` in processor time, which does not depend on who else uses the machine."""
    ours = median(_cpu("from consilium.cli.main import main; main(['--help'])") for _ in range(repeats))
    empty = median(_cpu("pass") for _ in range(repeats))
    return [
        Measured(
            "help", "processor time of `consilium --help`", ours, "allowed", SECONDS, "s", ours / SECONDS, 1.0,
            facts={"an empty Python": empty},
        )
    ]  # fmt: skip


def _cpu(code: str) -> float:
    before = _children()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return _children() - before


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
