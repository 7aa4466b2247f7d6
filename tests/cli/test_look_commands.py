"""methods, compare and report."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

import pytest

from consilium.methods import METHODS
from tests.cli.conftest import write_study
from tests.cli.terminal import call, refused

Finished = Callable[[str], Path]


def test_methods_lists_each_on_a_line() -> None:
    done = call("methods")
    assert (done.status, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines()[: len(METHODS)]] == list(METHODS)


described = cache(lambda name: call("methods", name))  # several tests look at every method


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_says_what_leaves_and_what_stays(name: str) -> None:
    done = described(name)
    assert done.status == 0
    assert done.out.startswith(f"{name}: ")
    for title in ("Paper: ", "Fields of [method]:", "Leaves the hospital every round:", "Stays at the hospital:"):
        assert f"\n{title}" in done.out


@pytest.mark.parametrize("name", list(METHODS))
def test_the_fields_of_a_method_are_toml_with_a_comment_each(name: str) -> None:
    """Those of a module stand below the name of its table."""
    sections = dict(re.findall(r"Fields of \[(method[.\w]*)\]:\n(.*?)\n\n", described(name).out, re.S))
    own = {field.name: getattr(METHODS[name](), field.name) for field in dataclasses.fields(METHODS[name])}
    modules = {f"method.{key}": value for key, value in own.items() if dataclasses.is_dataclass(value)}
    assert sections.keys() == {"method", *modules}
    lines = [line for section in sections.values() for line in section.splitlines() if line != "  nothing"]
    assert len(lines) == len(own) - len(modules) + sum(len(dataclasses.fields(module)) for module in modules.values())
    for line in lines:
        value, _, comment = line.strip().partition("  ")
        assert comment.strip(), line
        tomllib.loads(value)


def test_a_message_is_described_without_python() -> None:
    said = call("methods", "fedsm-extra").out
    assert "  models                models or nothing\n" in said
    assert "  targets               by name, each a whole number: the selector's target by training case" in said
    for name in METHODS:
        assert not re.search(r"None|Mapping|tuple\[|True|False", described(name).out), name


def test_what_leaves_in_a_study_is_said_with_sizes(federation: Path, tmp_path: Path) -> None:
    done = call("methods", "--study", write_study(tmp_path / "toy.toml", federation, "fedsm"))
    assert done.status == 0, done.err
    assert "what leaves each of 3 hospitals" in done.out
    train = done.out.partition("\ntrain (2 rounds, each ")[2].partition("\n\n")[0]
    unit = {"B": 1e-3, "kB": 1.0}
    total = float(train.partition(" kB")[0])
    fields = {words[0]: float(words[1]) * unit[words[2]] for words in map(str.split, train.splitlines()[1:])}
    assert {"global", "personal", "loss"} <= fields.keys()
    assert sum(fields.values()) == pytest.approx(total, rel=0.02)
    told = json.loads(call("methods", "--study", tmp_path / "toy.toml", "--json").out)
    assert told["hospitals"] == 3
    phase = next(phase for phase in told["phases"] if phase["phase"] == "train")
    assert (
        phase["bytes"] == sum(field["bytes"] for field in phase["fields"].values()) == pytest.approx(1e3 * total, 0.02)
    )


def test_methods_as_json() -> None:
    found = call("methods", "--json").document["methods"]
    assert [entry["name"] for entry in found] == list(METHODS)
    promised = {"name", "paper", "fields", "leaves_site", "stays", "deployable", "optimizer_state"}
    assert all(promised <= entry.keys() for entry in found)
    (one,) = call("methods", "--json", "fedsm").document["methods"]
    assert one["fields"]["pull"] == 0.7
    assert "personal" in one["leaves_site"]


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_an_unknown_method_is_answered_with_the_nearest(json_too: list[str]) -> None:
    refused(call("methods", "fedms", *json_too), "'fedms'", "did you mean 'fedsm'?")
    refused(call("methods", "zzz", *json_too), "use one of", *METHODS)
    refused(call("methods", "mine.py", *json_too), "with its class, as mine.py:Mine")


def test_an_alias_is_its_method() -> None:
    assert call("methods", "centralized").out == call("methods", "pooled").out


def test_ready_studies_are_listed_and_copied(tmp_path: Path) -> None:
    listed = call("studies").out
    assert [line for line in listed.splitlines() if not line.endswith(".")] == []  # whole sentences
    assert "retina_fedsm        " in listed
    assert "Table 3 of the FedSM paper on phantoms" in listed
    assert "fedsm_base" not in listed
    copied = call("studies", "fedsm_table3_quick", "--to", tmp_path / "mine")
    names = {Path(line).name for line in copied.out.split()}
    assert names == {path.name for path in (tmp_path / "mine").iterdir()}
    assert {"fedsm_table3_quick.toml", "fedsm_quick_base.toml"} <= names
    refused(call("studies", "fedsm_table3_quick", "--to", tmp_path / "mine"), "exists already")
    refused(call("studies", "fedsm_table33"), "did you mean 'fedsm_table3'")


def test_compare_prints_a_table(finished: Finished) -> None:
    done = call("compare", finished("fedavg"), finished("fedsm"))
    assert (done.status, done.err) == (0, "")
    for word in ("ada", "bea", "cid", "site mean", "pooled", "FedAvg", "FedSM"):
        assert word in done.out


@pytest.mark.parametrize("command", ["compare", "report"])
def test_what_lies_beside_run_folders_is_passed_over(command: str, finished: Finished, tmp_path: Path) -> None:
    """A shell writes all of it for `runs/*`."""
    suite, store, ruled = tmp_path / "tiny", tmp_path / "mlflow.db", tmp_path / "policy-0123abcd"
    suite.mkdir()
    (suite / "choices.json").write_text("{}")
    (ruled / "toy-fedavg-s0").mkdir(parents=True)
    store.touch()
    page = ["--to", tmp_path / "page.html"] if command == "report" else ["--json"]
    done = call(command, suite, finished("fedavg"), store, ruled, *page)
    assert done.status == 0
    if command == "compare":
        assert [row["run"] for row in done.document["rows"]] == [finished("fedavg").name]
    for beside in (suite, store):
        refused(call(command, beside, *page[:2]), f"{beside.name} is not a run")


def test_compare_as_json(finished: Finished) -> None:
    runs = [finished("fedavg"), finished("fedsm")]
    rows = call("compare", "--json", *runs).document["rows"]
    assert [(row["run"], row["method"], row["seed"]) for row in rows] == [
        (runs[0].name, "fedavg", 0),
        (runs[1].name, "fedsm", 0),
    ]
    for run, row in zip(runs, rows):
        assert row["headline"] == json.loads((run / "summary.json").read_text())["headline"]
        assert row["headline"]["sites"].keys() == {"ada", "bea", "cid"}


@pytest.mark.parametrize("command", ["compare", "report"])
def test_what_is_not_a_run_is_refused(command: str, federation: Path, tmp_path: Path) -> None:
    page = ["--to", tmp_path / "page.html"] if command == "report" else []
    for folder in (tmp_path / "nowhere", federation):
        refused(call(command, folder, *page), f"{folder} is not a run")
    assert not (tmp_path / "page.html").exists()


def test_compare_of_an_unfinished_run_names_resume(
    federation: Path, tmp_path: Path, failing: Callable[[int], AbstractContextManager[None]]
) -> None:
    file = write_study(tmp_path / "toy.toml", federation)
    with failing(2):
        stopped = call("run", file, "--runs", tmp_path / "runs", "--workers", 0)
    assert stopped.status == 1
    (run,) = (tmp_path / "runs").iterdir()
    refused(call("compare", run), f"`consilium resume {run}`")
    spaced = run.rename(tmp_path / "my run")
    refused(call("compare", spaced), f"`consilium resume '{spaced}'`")  # as a shell takes it


def test_report_writes_one_page(finished: Finished, tmp_path: Path) -> None:
    page = tmp_path / "new/page.html"
    done = call("report", finished("fedavg"), finished("fedsm"), "--to", page)
    assert (done.status, done.out) == (0, f"{page}\n")
    text = page.read_text()
    assert "FedSM" in text and "ada" in text
    assert text.count("<script") == 1 and "http:" not in text and "https:" not in text
    refused(call("report", finished("fedavg"), "--to", tmp_path), "is a folder")
