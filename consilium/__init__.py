"""Federated medical imaging across hospitals whose data differ.

>>> from consilium import load_study, run
>>> result = run(load_study("studies/retina_fedsm.toml"))    # doctest: +SKIP
>>> result.summary["headline"]["site_mean"]                  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# MKL's dot and mv otherwise change with the alignment of their inputs; it must be set before torch is imported.
os.environ.setdefault("MKL_CBWR", "AVX2")

__version__ = "0.1.0"
__all__ = ["METHODS", "Weights", "load_study", "resume", "run"]

_HOMES = {
    "METHODS": "consilium.methods",
    "Weights": "consilium.weights",
    "load_study": "consilium.study",
    "resume": "consilium.simulation",
    "run": "consilium.simulation",
}

if TYPE_CHECKING:
    from consilium.methods import METHODS
    from consilium.simulation import resume, run
    from consilium.study import load_study
    from consilium.weights import Weights


def __getattr__(name: str) -> Any:
    """Load torch only when something that needs it is asked for."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'consilium' has no attribute '{name}'")
