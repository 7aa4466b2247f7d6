"""A user's mistakes, and failures nobody expected: exit status, one sentence, no traceback."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from consilium import simulation
from consilium.cli.main import main
from tests.cli.conftest import write_study
from tests.cli.terminal import Outcome, call, refused

Failing = Callable[[int], AbstractContextManager[None]]
Finished = Callable[[str], Path]


def run(study: Path, *changes: str) -> Outcome:
    words = [word for change in changes for word in ("--set", change)]
    return call("run", study, "--workers", 0, "--runs", study.parent / "runs", *words)


MISTAKES = {
    "study.rouns=3": ["[study]", "'rouns'", "did you mean 'rounds'?"],
    "studdy.rounds=3": ["[studdy]", "did you mean 'study'?"],
    "study.rounds=0": ["[study] rounds = 0", "at least 1"],
    "study.rounds=2.5": ["[study] rounds = 2.5", "whole number"],
    "study.rounds=true": ["[study] rounds = True", "whole number"],
    "study.seed=-1": ["[study] seed", "at least 0"],
    "study.keep_rounds=three": ["keep_rounds", "last-two, all"],
    'study.name="a b"': ["[study] name", "letters"],
    'study.sites=["zed"]': ["'zed'", "ada, bea, cid"],
    "study.sites=[ada]": ["--set study.sites=[ada]", "need quotes", '["a", "b"]'],
    "study.sites=ada": ["[study] sites = 'ada'", 'a list, for instance ["ada"]'],
    'study.leave_out=["ada","bea","cid"]': ["leave_out"],
    "study.away={zed=[1]}": ["'zed'", "ada, bea, cid"],
    "local.lr=-1": ["[local] lr", "positive"],
    "local.lr=nan": ["[local] lr", "positive"],
    "local.lr=fast": ["[local] lr = 'fast'", "number"],
    "local.optimizer=lion": ["[local] optimizer = 'lion'", "adam, adamw, sgd"],
    "local.batch_size=0": ["[local] batch_size", "at least 1"],
    "task.network=unett": ["[task] network = 'unett'", "did you mean 'unet"],
    "task.network=unet3d": ["[task] network", "2-D"],
    "task.loss=mse": ["[task] loss", "dice, dice+ce"],
    "task.widths=4": ["[task] widths", "list"],
    "task.widht=[4, 8]": ["[task]", "did you mean 'widths'?"],
    'task.augment=["spin"]': ["'spin'", "flip"],
    "preprocess.size=[16,16,16]": ["[preprocess] size", "2-D"],
    "preprocess.crop=all": ["[preprocess] crop", "none, foreground"],
    "method.name=fedms": ["[method] name = 'fedms'", "did you mean 'fedsm'?"],
    "method.mu=3": ["[method]", "has no key 'mu'", "pull"],
    "method.pull=0": ["[method] pull", "(0, 1]"],
    "method.pull=1.5": ["[method] pull", "(0, 1]"],
    "method.confidence=2": ["[method] confidence", "[0, 1]", "tuned"],
    "preprocess.slices=coronal": ["[preprocess] slices", "one of '', axial."],
    "method.name=scaffold": ["SCAFFOLD", "local.optimizer = 'sgd'"],
    "method.name=nowhere:Thing": ["nowhere:Thing", "import"],
    "method.name=os:path": ["os:path", "Method"],
    "data.federation=nowhere": ["[data] federation", "'nowhere'", "consilium phantom"],
    "rounds=3": ["section.key=value"],
    "study.rounds": ["section.key=value"],
}


@pytest.mark.parametrize("change", list(MISTAKES))
def test_a_wrong_key_type_or_range(change: str, federation: Path, tmp_path: Path) -> None:
    study = write_study(tmp_path / "toy.toml", federation, "fedsm", rounds=1)
    sentence = refused(run(study, change), *MISTAKES[change])
    assert sentence.startswith("consilium: ")
    assert sentence[-1] in ".?)"
    assert not list(tmp_path.glob("runs/*/journal.jsonl")), "it began all the same"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("local.device=quark", ["device"]),
        ("study.min_sites=9", ["min_sites", "3"]),
        ("study.away={ada=[0]}", ["away"]),
        ("task.dropout=2", ["dropout"]),
        ("task.residual_units=-1", ["residual_units"]),
        ("data.annotated={ada=3}", ["annotated", "list"]),
        ("study.sites_per_round=99", ["sites_per_round"]),
        ("preprocess.size=[2, 2]", ["[preprocess] size = [2, 2]", "does not suit the network", "widths"]),
        ("task.patch=[2, 2]", ["[task] patch = [2, 2]", "does not suit the network"]),
        ("study.away={ada=[1],bea=[1],cid=[1]}", ["[study] away", "every site is away in round 1"]),
    ],
)
def test_mistakes_found_before_the_first_round(change: str, words: list[str], federation: Path, tmp_path: Path) -> None:
    study = write_study(tmp_path / "toy.toml", federation, rounds=1)
    done = call("run", study, "--workers", 0, "--runs", tmp_path / "runs", "--json", "--set", change)
    assert refused(done, *words).startswith("consilium: [")


def test_files_that_are_no_study(tmp_path: Path, federation: Path) -> None:
    refused(call("run", tmp_path / "none.toml"), "none.toml")
    refused(call("run", tmp_path), str(tmp_path))
    files = {
        "[study\nrounds = 3": ["not valid TOML", "line 1"],
        "": ["[data] federation"],
        f'[data]\nfederation = "{federation}"': ["[method] name", "fedsm"],
        "rounds = 3": ["rounds"],
        "\x00": ["not valid TOML"],
    }
    for text, words in files.items():
        (tmp_path / "odd.toml").write_text(text)
        refused(call("run", tmp_path / "odd.toml"), *words)


def test_a_suite_is_no_study_and_a_study_no_suite(study: Path, tmp_path: Path) -> None:
    refused(call("suite", study), "is a study, not a suite; give it to `consilium run`")
    (tmp_path / "suite.toml").write_text('[suite]\nmethods = ["fedavg"]\n')
    refused(call("run", tmp_path / "suite.toml"), "this is a suite, not a study; give it to `consilium suite`")


def test_a_folder_of_runs_is_no_run(finished: Finished) -> None:
    run = finished("fedavg")
    for words in (["resume"], ["compare"], ["report"], ["export"]):
        refused(call(*words, run.parent), f"{run.parent} is not a run: it holds 1 of them", f"such as {run}")


def test_a_folder_beside_the_federation(federation: Path) -> None:
    for folder in (federation / "ada", federation.parent):
        done = call("check", folder)
        assert done.status == 2
        assert f"federation.toml: is not here but in {federation}; give that folder." in done.out


@pytest.mark.parametrize(
    "arguments",
    [["run"], ["run", "a.toml", "--bogus"], ["nope"], ["run", "a.toml", "--workers", "-1"], ["phantom", "retina"],
     ["--bogus"], ["compare"], ["predict", "runs/x"], ["check", "--seed", "x", "data"]],
)  # fmt: skip
def test_a_wrong_command_line(arguments: list[str]) -> None:
    done = call(*arguments)
    assert (done.status, done.out) == (2, "")
    assert "Traceback" not in done.err
    assert "--help" in done.err


def test_version_and_help() -> None:
    assert re.fullmatch(r"consilium \d+\.\d+\.\d+\n", call("--version").out)
    assert call("--help").status == 0


def test_json_mistakes_leave_standard_output_empty(study: Path) -> None:
    refused(call("run", study, "--json", "--set", "local.lr=-1"), "[local] lr")
    refused(call("compare", "--json", "nowhere"), "nowhere")
    refused(call("predict", "--json", "nowhere", "x.png"), "nowhere")


def test_the_unexpected_is_a_sentence_with_a_file(monkeypatch: pytest.MonkeyPatch, study: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.delenv("CONSILIUM_DEBUG", raising=False)
    monkeypatch.setattr(simulation, "go_on", fail)
    sentence = refused(run(study), "ZeroDivisionError", "a bug of ours", status=1)
    found = re.search(r"details in (\S+?);", sentence)
    assert found is not None
    details = Path(found[1])
    assert "Traceback" in details.read_text() and "go_on" in details.read_text()
    details.unlink()


@pytest.mark.parametrize(("number", "remedy"), [(errno.ENOSPC, "make room"), (errno.EROFS, "name another place")])
def test_a_disk_that_cannot_be_written_is_no_bug(number: int, remedy: str, finished: Finished, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "r.html"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("consilium.reporting.write_report", fail)
        done = call("report", finished("fedavg"), "--to", tmp_path / "r.html")
    assert "please report" not in refused(done, os.strerror(number), str(tmp_path / "r.html"), remedy, status=1)


def test_a_file_that_may_not_be_written_is_called_as_it_was_asked_for(
    federation: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files and folders have a hidden name until they are whole."""
    for name in (".a.toml.29198", ".a.toml.29198.partial", ".a.toml.29198-2.partial"):

        def forbidden(*_: object, name: str = name) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", f"/place/{name}")

        monkeypatch.setattr("consilium.data.check.check", forbidden)
        with pytest.raises(SystemExit):
            main(["check", str(federation)])
        assert "Permission denied (/place/a.toml): allow" in capsys.readouterr().err


def test_too_little_memory_is_no_bug(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of numpy's, which names the size that was asked for."""

    def full(*_: object) -> None:
        raise MemoryError("Unable to allocate 112. GiB")

    monkeypatch.setattr("consilium.dry_run.dry_run", full)
    study = write_study(tmp_path / "s.toml", federation)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(study), "--dry-run"])
    assert ended.value.code == 1
    assert "there is not enough memory (Unable to allocate 112. GiB): make images" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ damaged run folders


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.fixture
def copy(finished: Finished, tmp_path: Path) -> Callable[..., Path]:
    """A run folder to damage; `open` makes it look interrupted before its end."""

    def make(method: str = "fedavg", open: bool = True) -> Path:
        run = tmp_path / "run"
        shutil.copytree(finished(method), run)
        if open:
            (run / "summary.json").unlink()
        return run

    return make


def test_a_truncated_best_is_refused(copy: Callable[..., Path], federation: Path, tmp_path: Path) -> None:
    run = copy(open=False)
    cut(run / "best.safetensors")
    shutil.rmtree(run / "server")  # as `federation fetch` leaves it: there is nothing to repair it from
    image = federation / "ada/images/ada000.png"
    refused(call("predict", run, image, "--to", tmp_path / "out"), "best.safetensors", "damaged")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("harm", [cut, Path.unlink])
def test_a_damaged_store_is_refused(harm: Callable[[Path], None], copy: Callable[..., Path]) -> None:
    run = copy()
    for file in (run / "store").glob("*.safetensors"):
        harm(file)
    journal = (run / "journal.jsonl").read_bytes()
    refused(call("resume", run, "--workers", 0), ".safetensors")
    assert (run / "journal.jsonl").read_bytes() == journal, "a run that cannot go on is left as it was"


@pytest.mark.parametrize("name", ["server/best.json", "study.toml", "origin.json"])
def test_a_damaged_document_is_refused(name: str, copy: Callable[..., Path]) -> None:
    run = copy()
    cut(run / name)
    refused(call("resume", run, "--workers", 0), name)


@pytest.mark.parametrize("section", ["[task]", "[method]", "[privacy]", "[facts]", "contains ="])
def test_a_study_cut_short_is_refused(section: str, copy: Callable[..., Path]) -> None:
    """Sections lost at the end would otherwise be read as their defaults: privacy among them."""
    run = copy()
    text = (run / "study.toml").read_text()
    (run / "study.toml").write_text(text[: text.index(section)])
    said = refused(call("resume", run, "--workers", 0), "study.toml")
    assert said.count("study.toml") == 1


def test_a_forgotten_memory_is_refused(federation: Path, tmp_path: Path, failing: Failing) -> None:
    """SCAFFOLD's sites remember their control variates; a site without them cannot go on as if nothing were."""
    study = write_study(tmp_path / "toy.toml", federation, "scaffold", rounds=3)
    with failing(3):
        assert run(study, "local.optimizer=sgd", "local.momentum=0.0", "local.lr=0.1").status == 1
    (folder,) = (tmp_path / "runs").iterdir()
    shutil.rmtree(folder / "sites/bea/memory")
    done = call("resume", folder, "--workers", 0)
    assert "'bea' lacks a round that the server merged" in done.err
    assert not (folder / "server/00002.json").exists(), "the round was committed without the site"
    refused(done)


def test_a_run_of_another_method_is_refused(copy: Callable[..., Path]) -> None:
    run = copy("fedsm")
    head, _, rest = (run / "study.toml").read_text().partition("[method]")
    (run / "study.toml").write_text(f'{head}[method]\nname = "fedavg"\n\n[facts]{rest.partition("[facts]")[2]}')
    refused(call("resume", run, "--workers", 0), "was begun with method 'fedsm'", "says 'fedavg'")


def test_a_run_of_a_method_with_the_same_state_is_refused(copy: Callable[..., Path]) -> None:
    """The state of FedProx is that of FedAvg; its sites would go on with another loss."""
    run = copy()
    text = (run / "study.toml").read_text()
    (run / "study.toml").write_text(text.replace('name = "fedavg"', 'name = "fedprox"'))
    refused(call("resume", run, "--workers", 0), "was begun with method 'fedavg'", "says 'fedprox'")


def test_a_run_of_another_format_is_refused(copy: Callable[..., Path]) -> None:
    run = copy()
    origin = json.loads((run / "origin.json").read_text())
    (run / "origin.json").write_text(json.dumps({**origin, "format": 99, "versions": {"consilium": "7.0.0"}}))
    for words in (["resume", run], ["compare", run], ["report", run, "--to", run / "page.html"]):
        refused(call(*words), "7.0.0", "format 99")


@pytest.mark.parametrize(
    "lost",
    ["server", "journal.jsonl"],
)
def test_a_lost_part_never_means_a_silent_restart(lost: str, copy: Callable[..., Path]) -> None:
    run = copy()
    shutil.rmtree(run / lost) if (run / lost).is_dir() else (run / lost).unlink()
    refused(call("resume", run, "--workers", 0), lost)


def test_damaged_scores_are_refused(copy: Callable[..., Path]) -> None:
    run = copy()
    cut(run / "scores.csv")
    refused(call("resume", run, "--workers", 0), "scores.csv")


@pytest.mark.usefixtures("undrawn")
def test_resume_writes_a_damaged_summary_again(copy: Callable[..., Path]) -> None:
    run = copy(open=False)
    cut(run / "summary.json")
    refused(call("compare", run), "`consilium resume`")
    assert call("resume", run, "--workers", 0).status == 0


def test_python_m_consilium_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "consilium", "--version"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (call("--version").out, 0)


def test_paths_and_devices_that_are_not_there(study: Path, finished: Finished, tmp_path: Path) -> None:
    run = finished("fedavg")
    refused(call("resume", tmp_path / "nope"), f"{tmp_path / 'nope'} is not a run: there is no such folder.")
    refused(call("compare", run.parent.parent), "is not a run: it holds 1 of them", f"such as {run}")
    refused(call("run", tmp_path / "nope.toml"), "No such file", "`consilium studies` lists ready ones")
    refused(call("run", study, "--device", "gpu"), "device = 'gpu': it is one of auto, cpu, cuda, cuda:1, mps.")
    said = refused(call("run", study, "--device", "mps"), "take 'auto' or 'cpu'.")
    assert "device = 'mps' cannot be used" in said, "torch says why in forty lines"


def test_a_file_where_a_folder_must_be_and_the_reverse(finished: Finished, federation: Path, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("kept")
    for words in (
        ["studies", "retina_fedavg", "--to", file],
        ["demo", "--to", file, "--rounds", 1, "-q"],
        ["report", finished("fedavg"), "--to", file / "page.html"],
    ):
        refused(call(*words), f"({file}): name another file or folder.")
    image = federation / "ada/images/ada000.png"
    refused(call("predict", finished("fedavg"), image, "--to", file), f"cannot write into {file}: ", "another place")
    assert file.read_text() == "kept"
    done = call("check", federation, "--counts", tmp_path)
    assert done.status == 2 and f"Is a directory ({tmp_path}): name another" in done.err


def test_help_shows_no_type_beside_a_flag() -> None:
    for words in ([], ["federation"], ["federation", "kits"], ["run"], ["check"], ["federation", "try"]):
        told = call(*words, "--help")
        assert told.status == 0 and "<bool>" not in told.out
