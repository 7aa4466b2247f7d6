"""Suites: a grid of studies (methods × settings × seeds) and its table beside the paper's."""

from __future__ import annotations

from consilium.suites.reading import load_suite
from consilium.suites.running import SuiteResult, run_suite
from consilium.suites.sections import Suite

__all__ = ["Suite", "SuiteResult", "load_suite", "run_suite"]
