"""Federated medical imaging across hospitals whose data differ.

>>> from consilium import METHODS, load_study, run
>>> result = run(load_study("study.toml"), workers=0)
>>> result.summary["method"] in METHODS
True
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# MKL's dot and mv otherwise depend on the alignment of their inputs; this must be set before torch is imported.
os.environ.setdefault("MKL_CBWR", "AVX2")

__version__ = "0.2.0"
__all__ = ["METHODS", "Weights", "evaluate", "load_study", "open_run", "predict", "resume", "run"]

_HOMES = {
    "METHODS": "consilium.methods",
    "Weights": "consilium.weights",
    "evaluate": "consilium.finished_run",
    "load_study": "consilium.study_reading",
    "open_run": "consilium.finished_run",
    "predict": "consilium.finished_run",
    "resume": "consilium.simulation",
    "run": "consilium.simulation",
}

if TYPE_CHECKING:
    from consilium.finished_run import evaluate, open_run, predict
    from consilium.methods import METHODS
    from consilium.simulation import resume, run
    from consilium.study_reading import load_study
    from consilium.weights import Weights


def __getattr__(name: str) -> Any:
    """Load torch only when a name that needs it is used."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'consilium' has no attribute '{name}'")


def __dir__() -> list[str]:
    """The public names only, for Tab completion."""
    return sorted(__all__)
