"""cache: what is kept between commands is listed and removed, and made again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from consilium.data.cache import open_site
from consilium.data.preprocess import Preprocess
from consilium.data.site_folder import read_federation
from tests.cli.terminal import call, refused


@pytest.fixture
def filled(federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the arrays of two sites, one of them not used for ten days."""
    monkeypatch.setenv("CONSILIUM_CACHE", str(tmp_path / "cache"))
    found = read_federation(federation)
    for name in ("ada", "bea"):
        open_site(found, found.sites[name], Preprocess(orientation=""))
    for path in (tmp_path / "cache").rglob("*"):
        if "ada-" in str(path):
            os.utime(path, (time.time() - 10 * 86400,) * 2)
    return tmp_path / "cache"


def test_the_cache_is_listed(filled: Path) -> None:
    document = call("cache", "--json").document
    arrays = {entry["site"]: entry for entry in document["entries"] if entry["kind"] == "arrays"}
    assert set(arrays) == {"ada", "bea"} and document["cache"] == str(filled)
    held = sum(file.stat().st_size for file in Path(arrays["bea"]["path"]).iterdir())
    assert arrays["bea"]["bytes"] == held > 16 * 16 * 4 * 18
    assert arrays["ada"]["days"] == pytest.approx(10, abs=0.1) and arrays["bea"]["days"] < 0.1
    assert str(filled) in call("cache").out


def test_old_parts_are_removed_and_made_again(filled: Path, federation: Path) -> None:
    done = call("cache", "--clean", "--older", 5)
    assert done.status == 0 and "removed" in done.out
    assert {path.name.split("-")[0] for path in (filled / "arrays").iterdir()} == {"bea"}
    found = read_federation(federation)
    assert len(open_site(found, found.sites["ada"], Preprocess(orientation=""))) == 14


def test_what_is_used_is_not_old(filled: Path, federation: Path) -> None:
    found = read_federation(federation)
    open_site(found, found.sites["ada"], Preprocess(orientation=""))
    sites = {entry["site"] for entry in call("cache", "--older", 5, "--json").document["entries"]}
    arrays = [e for e in call("cache", "--older", 5, "--json").document["entries"] if e["kind"] == "arrays"]
    assert arrays == [] and sites <= {"ada"}


def test_one_site_and_an_empty_cache(filled: Path) -> None:
    assert call("cache", "--clean", "--site", "bea", "--json").document["freed"] > 0
    assert {e["site"] for e in call("cache", "--json").document["entries"]} == {"ada"}
    call("cache", "--clean")
    assert call("cache", "--json").document["entries"] == []


@pytest.mark.usefixtures("no_report")
def test_cases_are_prepared_before_a_study_is_run(
    study: Path, federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSILIUM_CACHE", str(tmp_path / "cache"))
    done = call("cache", "--study", study, "--workers", 1)
    assert done.status == 0 and "ada: 14 cases are ready" in done.err
    made = sorted(path.name for path in (tmp_path / "cache/arrays").iterdir())
    assert call("run", study, "--workers", 0, "--runs", tmp_path / "runs").status == 0
    assert sorted(path.name for path in (tmp_path / "cache/arrays").iterdir()) == made
    refused(call("cache", federation), "--study")
