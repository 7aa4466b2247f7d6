"""A turned bit, an empty or a missing file in what is stored: noticed, repaired where it can be, and never used."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import packet_files, simulation, store, tree
from consilium.contract import Interrupted, crash_after, digest, run_and_copy, run_in_process
from consilium.errors import RunError
from consilium.files import checked_line, read_line
from consilium.prediction import open_predictor
from consilium.reports.reading import read_run
from consilium.run_folder import RunFolder
from consilium.store import DamagedError, MemoryStore, Store, read_document, read_release, write_document, write_release
from consilium.tree import PacketError, flatten, message
from consilium.weights import Weights
from tests.toy import toy_study

FILES = ("last.safetensors", "best.safetensors", "scores.csv")


@message
class Memory:
    own: Weights
    step: int


def vector(value: float, size: int = 300) -> Weights:
    return Weights({"w": torch.full((size,), value)})


def turn_a_bit(path: Path, place: int = -2) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x40
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


HARMS: dict[str, Callable[[Path], None]] = {
    "a turned bit": turn_a_bit,
    "an empty file": empty,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "gone": Path.unlink,
}


@pytest.fixture(params=[n if n in ("a turned bit", "gone") else pytest.param(n, marks=pytest.mark.slow) for n in HARMS])
def harm(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return HARMS[request.param]


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_told", set())


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


# ---------------------------------------------------------------------------------------------- the store


def test_a_damaged_file_of_the_store_is_not_used(harm: Callable[[Path], None], tmp_path: Path) -> None:
    document = Store(tmp_path).put(Memory(vector(1.0), 3))
    harm(only(tmp_path, "*.safetensors"))
    with pytest.raises(PacketError, match=r"\.safetensors"):
        Store(tmp_path).get(document, Memory)


def test_a_damaged_file_of_the_store_is_written_again(
    harm: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the right name; the store of 0.1 took it for the content."""
    item = Memory(vector(1.0), 3)
    Store(tmp_path).put(item)
    harm(only(tmp_path, "*.safetensors"))
    gone = not list(tmp_path.iterdir())
    again = Store(tmp_path)
    assert digest(again.get(again.put(item), Memory)) == digest(item)
    assert ("it was written again" in caplog.text) is not gone


def test_damage_under_an_open_store_is_noticed(harm: Callable[[Path], None], tmp_path: Path) -> None:
    """A file is known by its inode, size and time: one that changed is read through again."""
    own = Store(tmp_path)
    document = own.put(Memory(vector(1.0), 3))
    own.get(document, Memory)
    harm(only(tmp_path, "*.safetensors"))
    with pytest.raises(PacketError):
        own.get(document, Memory)


def test_a_file_is_read_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = Store(tmp_path).put(Memory(vector(1.0), 3))
    read: list[Weights] = []
    through = store._read_through
    monkeypatch.setattr(store, "_read_through", lambda weights: (read.append(weights), through(weights))[1])
    other = Store(tmp_path)
    for _ in range(3):
        other.get(document, Memory)
    assert len(read) == 1
    other.get(other.put(Memory(vector(2.0), 3)), Memory)
    assert len(read) == 1  # what was written here is known


def test_a_document_is_checked_and_one_of_0_1_is_read(tmp_path: Path) -> None:
    facts = {"round": 3, "merged": {"ada": 3}, "server": {"shape": "{}", "weights": {}, "tensors": None}}
    path = tmp_path / "00003.json"
    write_document(facts, path)
    content, used = path.read_bytes(), 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        try:
            used += read_document(path) != facts
        except DamagedError:
            continue
    assert used == 0
    path.write_text(json.dumps(facts, indent=1))
    assert read_document(path) == facts


# ---------------------------------------------------------------------------------------------- a site


def test_a_damaged_memory_is_said_with_a_remedy(harm: Callable[[Path], None], tmp_path: Path) -> None:
    MemoryStore(tmp_path, "hk").put(4, Memory(vector(1.0), 3), keep=())
    harm(only(tmp_path / "store", "*.safetensors"))
    with pytest.raises(
        DamagedError, match=r"memory of site 'hk' of round 5 cannot be used: .*Restore the site's memory"
    ):
        MemoryStore(tmp_path, "hk").at(4, Memory)


def test_a_turned_bit_in_a_memorys_document_is_said(tmp_path: Path) -> None:
    memories = MemoryStore(tmp_path, "hk")
    memories.put(4, Memory(vector(1.0), 3), keep=())
    path = tmp_path / "00004.json"
    path.write_text(path.read_text().replace('\\"step\\":3', '\\"step\\":7'))
    with pytest.raises(DamagedError, match=r"00004.json is damaged"):
        memories.at(4, Memory)


@pytest.mark.parametrize("name", ["release.safetensors", "release.json"])
def test_a_damaged_release_is_not_used(harm: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    write_release(flatten(Memory(vector(1.0), 3)), {"run": "r", "method": "m", "merged": 2}, tmp_path)
    packet, facts = read_release(tmp_path)
    assert (digest(tree.unflatten(packet, Memory)), facts["merged"]) == (digest(Memory(vector(1.0), 3)), 2)
    harm(tmp_path / name)
    with pytest.raises(DamagedError, match=rf"{name}.*consilium federation fetch"):
        read_release(tmp_path)


def test_a_release_that_was_cut_off_between_its_two_files_is_not_used(tmp_path: Path) -> None:
    for place, value in (("first", 1.0), ("second", 2.0)):
        write_release(flatten(Memory(vector(value), 3)), {"merged": int(value)}, tmp_path / place)
    shutil.copy(tmp_path / "second" / "release.safetensors", tmp_path / "first")
    with pytest.raises(DamagedError, match=r"not the one that release.json was written for"):
        read_release(tmp_path / "first")


def test_a_release_of_0_1_opens_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packet_files.write(flatten(Memory(vector(1.0), 3)), tmp_path / "release.safetensors")
    (tmp_path / "release.json").write_text(json.dumps({"run": "r", "method": "m", "merged": 2}))
    with caplog.at_level(logging.WARNING, "consilium"):
        for _ in range(2):
            assert read_release(tmp_path)[1]["merged"] == 2
    assert caplog.text.count("version 0.1, without a digest: it is used unchecked") == 1


# ---------------------------------------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def calm(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SCAFFOLD, whose sites remember: a run that nothing happened to."""
    return run_and_copy(study(federation), tmp_path_factory.mktemp("calm"))[0].folder


def study(federation: Path) -> Any:
    return toy_study(federation, "scaffold", study__rounds=3, study__score_every=3, local__batch_size=4)


def crashed(calm: Path, runs: Path) -> Path:
    """The same, ended by a crash after its second round."""
    return Path(shutil.copytree(calm.parent / "killed/round" / calm.name, runs / calm.name))


def state_files(run: Path, index: int) -> set[Path]:
    """What a state refers to, and no other does."""
    facts = {i: read_document(run / "server" / f"{i:05d}.json")["server"] for i in (0, 1)}
    names = {i: store.names_in(facts[i]) for i in facts}
    return {run / "store" / f"{name}.safetensors" for name in names[index] - names[1 - index]}


@pytest.mark.parametrize("what", ["document", "weights"])
def test_a_damaged_state_is_made_again_from_the_one_before(
    what: str, harm: Callable[[Path], None], calm: Path, tmp_path: Path
) -> None:
    """Round 2 is made again, and the run ends with the very bytes of one that nothing happened to."""
    run = crashed(calm, tmp_path)
    for path in [run / "server" / "00001.json"] if what == "document" else state_files(run, 1):
        harm(path)
    simulation.resume(run, workers=0)
    for file in FILES:
        assert (run / file).read_bytes() == (calm / file).read_bytes(), file
    warnings = [event["text"] for event in RunFolder.open(run).events() if event["event"] == "warning"]
    gone = what == "document" and harm is Path.unlink  # then the state before is simply the last
    assert any("the run continues from the state of round 1" in text for text in warnings) is not gone


def memory_files(run: Path, index: int, site: str = "bea") -> set[Path]:
    """The document of a site's memory of a round, and what only it refers to."""
    folder = run / "sites" / site / "memory"
    names = {int(path.stem): store.names_in(read_document(path)) for path in folder.glob("*.json")}
    others = set().union(*(names[other] for other in names if other != index))
    return {folder / f"{index:05d}.json", *(folder / "store" / f"{n}.safetensors" for n in names[index] - others)}


@pytest.mark.parametrize("harm", [turn_a_bit, Path.unlink])
def test_a_damaged_memory_is_made_again_by_repeating_its_round(
    harm: Callable[[Path], None], calm: Path, tmp_path: Path
) -> None:
    """The state before that round and the memory before it are kept: the run ends with the very same bytes."""
    run = crashed(calm, tmp_path)
    for path in memory_files(run, 1):
        harm(path)
    simulation.resume(run, workers=0)
    for file in FILES:
        assert (run / file).read_bytes() == (calm / file).read_bytes(), file
    said = [event["text"] for event in RunFolder.open(run).events() if event["event"] == "warning"]
    assert said == ["the memory of bea was damaged; round 2 was repeated there to make it again."]


def test_a_memory_damaged_before_it_is_scored_is_made_again(federation: Path, calm: Path, tmp_path: Path) -> None:
    def harm_when(event: Any) -> None:
        if (event["event"], event.get("round")) == ("round", 3):
            for path in memory_files(only(tmp_path, "*"), 2):
                empty(path)

    run = run_in_process(local_models(federation), tmp_path, harm_when).folder
    said = [event["text"] for event in RunFolder.open(run).events() if event["event"] == "warning"]
    assert said == ["the memory of bea was damaged; round 3 was repeated there to make it again."]
    whole = run_in_process(local_models(federation), tmp_path / "whole").folder
    assert (run / "scores.csv").read_bytes() == (whole / "scores.csv").read_bytes()


def local_models(federation: Path) -> Any:
    return toy_study(federation, "fedavg-local", study__rounds=3, study__score_every=3, local__batch_size=4)


@pytest.mark.parametrize("rejoin", [False, True])
def test_without_the_memory_before_it_a_person_is_asked_or_the_site_goes_on_as_new(
    rejoin: bool, federation: Path, tmp_path: Path
) -> None:
    changed = toy_study(federation, "scaffold", study__rounds=3, study__score_every=3, study__rejoin=rejoin)
    with pytest.raises(Interrupted):
        run_in_process(changed, tmp_path, crash_after("round", 2))
    run = only(tmp_path, "*")
    for path in memory_files(run, 1) | memory_files(run, 0):
        empty(path)
    if not rejoin:
        with pytest.raises(RunError, match=r"memory of site 'bea' of round 2.*`consilium run STUDY.toml --again`"):
            simulation.resume(run, workers=0)
        return
    simulation.resume(run, workers=0)
    [event] = [event for event in RunFolder.open(run).events() if event["event"] == "rejoined"]
    assert (event["site"], event["round"]) == ("bea", 3)


def test_a_private_study_does_not_repeat_a_round(federation: Path, tmp_path: Path) -> None:
    """The same noise over another update would tell their difference."""
    private = toy_study(federation, study__rounds=3, privacy__clip=1.0, privacy__noise=1.0)
    with pytest.raises(Interrupted):
        run_in_process(private, tmp_path, crash_after("round", 2))
    for path in memory_files(only(tmp_path, "*"), 1):
        empty(path)
    with pytest.raises(RunError, match="memory of site 'bea' of round 2"):
        simulation.resume(only(tmp_path, "*"), workers=0)


def test_without_a_sound_state_the_sentence_names_the_file_and_a_command(
    harm: Callable[[Path], None], calm: Path, tmp_path: Path
) -> None:
    run = crashed(calm, tmp_path)
    damaged = [*state_files(run, 0), *state_files(run, 1)]
    for path in damaged:
        harm(path)
    with pytest.raises(
        RunError, match=r"store/[0-9a-f]{32}\.safetensors.*`consilium run .*study.toml --runs ELSEWHERE`"
    ):
        simulation.resume(run, workers=0)


def test_a_damaged_best_state_is_written_again_from_the_store(
    harm: Callable[[Path], None], calm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Path(shutil.copytree(calm, tmp_path / "run"))
    harm(run / "best.safetensors")
    images = torch.rand((2, 1, 16, 16), generator=torch.Generator().manual_seed(0))
    answers = [open_predictor(path)[1].answer(images).output for path in (run, calm)]
    assert torch.equal(*answers)
    if harm is not Path.unlink:  # a run without the file is not finished with writing it: the store is used
        assert (run / "best.safetensors").read_bytes() == (calm / "best.safetensors").read_bytes()
        assert "written again from the run's store" in caplog.text


@pytest.mark.parametrize("how", ["a turned bit", "an empty file", "cut short"])
def test_a_fetched_run_with_a_damaged_best_state_is_refused(how: str, calm: Path, tmp_path: Path) -> None:
    """What the administrator fetches has no store to repair it from."""
    run = Path(shutil.copytree(calm, tmp_path / "run", ignore=shutil.ignore_patterns("store", "server")))
    HARMS[how](run / "best.safetensors")
    with pytest.raises(RunError, match=r"best.safetensors.*copy it again"):
        open_predictor(run)


@pytest.mark.parametrize("fetched", [False, True])
def test_a_best_state_of_0_1_is_checked_where_that_is_possible(
    fetched: bool, calm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Path(shutil.copytree(calm, tmp_path / "run"))
    method = RunFolder.open(run).study.method
    packet = flatten(packet_files.load(run / "best.safetensors", method.Server))
    packet_files.write(packet, run / "best.safetensors")  # as 0.1 wrote it
    if fetched:
        shutil.rmtree(run / "server")
    open_predictor(run)
    assert ("used unchecked" in caplog.text) is fetched
    turn_a_bit(run / "best.safetensors")
    caplog.clear()
    open_predictor(run)
    assert ("written again from the run's store" in caplog.text) is not fetched


def test_a_journal_with_rubbish_at_its_end_goes_on(calm: Path, tmp_path: Path) -> None:
    """A file system may show zeros, or half of two lines, where a power cut ended an append."""
    run = crashed(calm, tmp_path)
    with (run / "journal.jsonl").open("ab") as file:
        file.write(b'{"event": "trai\n\0\0\0\0\n\0\0')
    simulation.resume(run, workers=0)
    for file in FILES:
        assert (run / file).read_bytes() == (calm / file).read_bytes(), file


# ---------------------------------------------------------------------------------------------- journal and scores


def test_a_turned_bit_anywhere_in_a_line_of_the_journal_is_noticed() -> None:
    """Every bit of every byte but those that leave the text as JSON with the same meaning: there are none."""
    line = checked_line({"event": "train", "round": 3, "loss": 0.25, "site": "ada", "time": "2026-01-01T00:00:00"})
    facts = read_line(line)
    assert facts["loss"] == 0.25
    assert "crc" not in facts
    for place in range(len(line)):
        for bit in range(7):
            turned = f"{line[:place]}{chr(ord(line[place]) ^ (1 << bit))}{line[place + 1 :]}"
            with pytest.raises(ValueError):  # noqa: PT011 - of JSON or of the checksum
                read_line(turned)


def test_a_line_of_0_1_has_no_checksum_and_is_read() -> None:
    assert read_line('{"event": "round", "time": "2026"}') == {"event": "round", "time": "2026"}


@pytest.mark.parametrize("name", ["journal.jsonl", "scores.csv"])
def test_a_changed_digit_stops_whoever_reads_it(name: str, calm: Path, tmp_path: Path) -> None:
    run = crashed(calm, tmp_path) if name == "journal.jsonl" else tmp_path / "run"
    if name == "scores.csv":
        shutil.copytree(calm, run)
        (run / "summary.json").unlink()  # not finished: resume looks at its scores
    path = run / name
    text = path.read_text()
    spot = [found.start() for found in re.finditer(r"\.\d\d", text)][-1] + 2  # in the last fraction
    path.write_text(f"{text[:spot]}{'3' if text[spot] != '3' else '4'}{text[spot + 1 :]}")
    with pytest.raises(RunError, match=f"{name}.*(damaged|not what was written|not an event)"):
        simulation.resume(run, workers=0)
    view = read_run(run)
    with pytest.raises(RunError, match=f"{name}.*(not what was written|not an event)"):
        _ = view.rows
