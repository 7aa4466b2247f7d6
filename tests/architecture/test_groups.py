"""Tests that share runs must meet in one process: otherwise every process trains them again."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("by-mark")
def test_a_marked_test_stays_in_its_group(request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process runs all tests")
    assert request.node.nodeid.endswith("@by-mark")


def test_the_tests_of_a_folder_stay_together(request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process runs all tests")
    assert request.node.nodeid.endswith("@architecture")
