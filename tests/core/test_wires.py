"""Wires carry packets and decide nothing: the same bits whoever answers first, and however many processes there are."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from consilium import engine, simulation, tree
from consilium.children import WORKER
from consilium.contract import run_in_process
from consilium.errors import DataError, WireError
from consilium.machine import pick_device, use_threads
from consilium.messages import AnswerHead, Envelope, Request, card_from_json, card_to_json, roster_of
from consilium.methods.fedavg import FedAvg
from consilium.run_folder import RunFolder
from consilium.simulation import Result
from consilium.site import Round, Site, SiteCard
from consilium.site_service import SiteAnswer
from consilium.study import Study
from consilium.weights import SiteName
from consilium.wires import processes
from consilium.wires.in_process import InProcess
from consilium.wires.local_sites import LocalAnswer, LocalRequest, LocalSites
from consilium.wires.processes import Pool, Processes, _Process, held_back, place_for
from tests.toy import toy_study, write_toy

FILES = ("last.safetensors", "best.safetensors", "scores.csv")


def short(federation: Path, method: str = "fedsm") -> Study:
    return toy_study(federation, method, study__rounds=2, local__batch_size=4)


@pytest.fixture(scope="session")
def plain(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_in_process(short(federation), tmp_path_factory.mktemp("plain"))


def assert_same(path: Path, plain: Result) -> None:
    for file in FILES:
        assert (path / file).read_bytes() == (plain.folder / file).read_bytes(), file


class Backwards(InProcess):
    """Sites are asked, and answer, in the opposite order."""

    def ask(self, requests: Mapping[SiteName, Any]) -> Iterator[tuple[SiteName, Any]]:
        return super().ask({name: requests[name] for name in reversed(list(requests))})


def test_the_same_bits_whoever_answers_first(federation: Path, tmp_path: Path, plain: Result) -> None:
    study = short(federation)
    folder = RunFolder.create(study, tmp_path)
    engine.run(study, Backwards(study, folder.path), folder)
    assert_same(folder.path, plain)


class Careless(FedAvg):
    """Writes to what it was sent."""

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        for tensor in got.global_.values():
            tensor.mul_(0.5)
        return super().train(site, memory, got, round)


class Careful(FedAvg):
    """The same arithmetic on a copy."""

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        return super().train(site, memory, self.Downlink(0.5 * got.global_), round)


def test_what_one_site_does_to_its_order_no_other_sees(federation: Path, tmp_path: Path) -> None:
    """All are sent the same file, and a process reads its table once."""
    careless, careful = (
        run_in_process(toy_study(federation, f"tests.core.test_wires:{kind.__name__}", study__rounds=2), tmp_path)
        for kind in (Careless, Careful)
    )
    for file in ("last.safetensors", "scores.csv"):
        assert (careless.folder / file).read_bytes() == (careful.folder / file).read_bytes(), file


def test_the_spool_holds_the_orders_under_way(federation: Path, tmp_path: Path) -> None:
    """No order's name is used again, and what a killed run left is gone."""
    seen: list[list[str]] = []

    def look(event: Mapping[str, Any]) -> None:
        if event["event"] in ("start", "round"):
            seen.append([path.name for path in (folder.path / "spool").glob("*.order")])

    study = toy_study(federation, "fedavg", study__rounds=3)
    folder = RunFolder.create(study, tmp_path, look)
    (folder.path / "spool").mkdir()
    (folder.path / "spool" / "ada.0.order").touch()
    engine.run(study, InProcess(study, folder.path), folder)
    assert [len(names) for names in seen] == [0, 1, 1, 1]
    assert seen[1] != seen[3]  # a round is told when the next one's order may be out: which of them is not promised


class Few(Pool):
    """Processes of other pools, so that torch need not be imported again."""

    def __init__(self, processes: list[Any]) -> None:
        super().__init__(len(processes))
        for own in self.processes:
            own.forget()
        while not self._idle.empty():
            self._idle.get()
        self.processes = processes
        for process in processes:
            self._idle.put(process)

    def close(self) -> None:
        self._threads.shutdown()


@pytest.fixture(scope="module")
def third() -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


@pytest.mark.xdist_group("pool")
@pytest.mark.parametrize(
    "workers", [1, 2, pytest.param(3, marks=pytest.mark.federation)]
)  # the third is started for it
def test_the_same_bits_for_any_number_of_processes(
    workers: int, federation: Path, tmp_path: Path, plain: Result, pool: Pool, third: Pool
) -> None:
    with Few([*pool.processes, *third.processes][:workers]) as few:
        result = simulation.run(short(federation), tmp_path, pool=few)
    assert_same(result.folder, plain)


@pytest.mark.parametrize(("count", "processes", "first"), [(6, 2, 5), (6, 1, 6), (6, 8, 1), (1, 2, 1), (0, 2, 0)])
def test_answers_wait_while_every_process_has_work(count: int, processes: int, first: int) -> None:
    """With six sites and two processes, four answers wait until the fifth shows that a process is idle."""
    came: list[int] = []

    def coming() -> Iterator[int]:
        for number in range(count):
            came.append(number)
            yield number

    answers = held_back(coming(), count, processes, lambda number: False)
    assert next(answers, None) == (0 if count else None)
    assert len(came) == first
    assert list(answers) == list(range(1, count))


def test_a_fault_does_not_wait() -> None:
    came: list[int] = []

    def coming() -> Iterator[int]:
        for number in range(6):
            came.append(number)
            yield number

    answers = held_back(coming(), 6, 2, lambda number: number == 1)
    assert [next(answers), next(answers)] == [0, 1]
    assert came == [0, 1]


def test_a_process_goes_on_with_the_sites_that_it_has_open() -> None:
    """To open a site takes longer than a small step: others' sites are taken when none of its own waits."""

    def waiting(*sites: str) -> list[LocalRequest]:
        return [LocalRequest("run", site, Request("train", "run"), "", "") for site in sites]

    opened = {("run", "bea"), ("run", "dan"), ("other", "ada")}
    assert place_for(opened, waiting("ada", "bea", "cid", "dan")) == 1
    assert place_for(opened, waiting("ada", "cid", "dan")) == 2
    assert place_for(opened, waiting("ada", "cid")) == 0


class Recorder:
    """A worker's end of the connection, which answers that all is well."""

    def __init__(self) -> None:
        self.asked: list[LocalRequest] = []

    def worker(self, log: IO[bytes], modules: Collection[str], number: int) -> tuple[socket.socket, int]:
        here, there = socket.socketpair()
        threading.Thread(target=self._answer, args=(there,), daemon=True).start()
        return here, 1

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                self.asked.append(tree.from_text(line, LocalRequest))
                connection.sendall((tree.to_text(LocalAnswer(AnswerHead())) + "\n").encode())


def test_a_process_is_told_the_roster_of_a_run_once() -> None:
    """Of 384 sites it is 40 kB: with every request, that is 15 MB a round."""
    stem = Recorder()
    process = _Process(stem, (), 0)  # type: ignore[arg-type]

    def ask(folder: str, roster: str) -> str:
        process.ask(LocalRequest(folder, "ada", Request("train", "run", roster=roster), "", ""))
        sent = stem.asked[-1].request
        assert sent is not None
        return sent.roster

    assert [ask("one", "abc"), ask("one", "abc"), ask("two", "abc"), ask("one", "abcd"), ask("one", "abcd")] == [
        "abc", "", "abc", "abcd", ""
    ]  # fmt: skip
    process.ask(LocalRequest("one", "", None, "", ""))  # the run is closed, and forgotten there
    assert ask("one", "abcd") == "abcd"
    process.stop()
    assert ask("two", "abc") == "abc"  # another process
    process.stop()
    process.forget()


def test_a_site_gets_the_roster_that_its_process_was_told(federation: Path, tmp_path: Path) -> None:
    study = short(federation)
    folder = RunFolder.create(study, tmp_path)
    wire = InProcess(study, folder.path)
    roll = wire.roll_call()
    sites, seen = LocalSites(), []
    for name, roster in {"ada": wire.members, "bea": ""}.items():
        sites._service(str(folder.path), name).answer = lambda request, order: (  # type: ignore[method-assign]
            seen.append(roster_of(request.roster)) or SiteAnswer(AnswerHead())
        )
        sites.answer(LocalRequest(str(folder.path), name, Request("train", "run", roster=roster), "", ""))
    assert seen == [roll.members, roll.members]


def test_replies_of_a_round_are_one_file_of_a_process(federation: Path, tmp_path: Path) -> None:
    """To make a file takes longer than to fill it. It is deleted when the next orders go out."""

    class Watched(InProcess):
        def _read(self, site: SiteName, answer: LocalAnswer) -> Any:
            found = super()._read(site, answer)
            files.append([path.name for path in self.spool.glob("*.replies.*")])
            return found

    files: list[list[str]] = []
    study = short(federation, "fedavg")
    folder = RunFolder.create(study, tmp_path)
    engine.run(study, Watched(study, folder.path), folder)
    trained = [names for names in files if names]  # a card and a delivery have no packet
    assert {len(names) for names in trained} == {1}
    assert len({names[0] for names in trained}) < len(trained)


def test_threads_are_set_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch drops what it cached whenever they are set, even to what they were."""
    told: list[int] = []
    before, set_threads = torch.get_num_threads(), torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: told.append(count) or set_threads(count))
    try:
        use_threads(2)
        use_threads(2)
        use_threads(1)
        set_threads(2)  # by others
        use_threads(1)
        assert torch.get_num_threads() == 1
        assert told[-3:] == [2, 1, 1]
        assert len(told) <= 3
    finally:
        use_threads(before)


@pytest.mark.federation  # it kills a process and starts another
@pytest.mark.xdist_group("pool")
def test_a_killed_process_is_a_lost_reply_and_the_run_goes_on(federation: Path, tmp_path: Path, third: Pool) -> None:
    def kill(event: Mapping[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 1:
            os.kill(third.processes[0].pid, signal.SIGKILL)

    study = short(federation, "fedavg")
    folder = RunFolder.create(study, tmp_path, kill)
    engine.run(study, Processes(study, folder.path, third), folder)
    (event,) = [e for e in folder.events() if e["event"] == "lost"]
    assert event["round"] == 2
    assert "the worker process died" in event["why"]
    assert len([e for e in folder.events() if e["event"] == "train"]) == 5  # of six
    assert folder.finished


def test_the_threads_of_the_caller_do_not_matter(federation: Path, tmp_path: Path, plain: Result) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_same(run_in_process(short(federation), tmp_path).folder, plain)
    finally:
        torch.set_num_threads(before)


def test_nothing_is_left_in_the_spool(plain: Result) -> None:
    assert not (plain.folder / "spool").exists()


def test_a_site_is_told_about_itself_only() -> None:
    head = Envelope("run", "fedavg", Round(3, "train", 3, 9), {"ada": 2, "bea": 1}, {"ada": [0], "bea": [1]})
    told = head.request("train", "bea", "")
    assert (told.merged, told.wanted) == (1, (1,))
    assert head.request("train", "cid", "").merged == -1
    assert tree.from_text(tree.to_text(told), Request) == told


def test_a_card_comes_back() -> None:
    card = SiteCard("ada", 0, 8, ("disc", "cup"))
    assert card_from_json(card_to_json(card)) == card


def test_a_site_without_training_cases_is_named_at_roll_call(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "federation")
    table = folder / "bea" / "cases.csv"
    table.write_text(table.read_text().replace(",train,", ",test,"))
    study = short(folder, "fedavg")
    path = RunFolder.create(study, tmp_path / "runs").path
    with pytest.raises(DataError, match=r"no training cases at bea: draw splits with .*or leave the site out"):
        InProcess(study, path).roll_call()


def test_every_broken_site_is_named_at_roll_call(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "federation")
    for site in ("ada", "cid"):
        (folder / site / "images" / f"{site}000.png").write_bytes(b"no picture")
    study = short(folder, "fedavg")
    path = RunFolder.create(study, tmp_path / "runs").path
    with pytest.raises(DataError) as error:
        InProcess(study, path).roll_call()
    assert "ada000" in str(error.value)
    assert "cid000" in str(error.value)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("consilium.site_service.site_facts", "site 'ada' could not be opened"),
        ("consilium.worker.Worker.score", "scoring failed at site 'bea'"),
    ],
)
def test_a_failure_of_a_site_names_the_file_of_its_traceback(
    task: str, words: str, federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise TypeError("a bug of ours")

    monkeypatch.setattr(task, fail)
    with pytest.raises(WireError, match=rf"{words}: TypeError: a bug of ours \(details in .*errors.log\)\."):
        run_in_process(short(federation, "fedavg"), tmp_path)
    (folder,) = tmp_path.iterdir()
    assert "Traceback" in next(folder.glob("sites/*/errors.log")).read_text()


class Waiting:
    """A process that answers only when it is stopped."""

    def __init__(self) -> None:
        self.opened: set[tuple[str, str]] = set()
        self.asked = 0
        self.busy, self._stopped = threading.Event(), threading.Event()

    def ask(self, request: Any) -> LocalAnswer:
        self.asked += 1
        self.busy.set()
        assert self._stopped.wait(150)
        return LocalAnswer(AnswerHead("gone"), "the worker process died", died=True)

    def stop(self) -> None:
        self._stopped.set()

    def forget(self) -> None: ...


def test_a_pool_that_is_closed_starts_nothing_again() -> None:
    """Ctrl-C closes the pool while sites work: neither the lost request nor those that wait are begun."""
    pool = Pool(1)
    pool.processes[0].forget()
    pool._idle.get()
    process = Waiting()
    pool.processes = [process]  # type: ignore[list-item]
    pool._idle.put(process)  # type: ignore[arg-type]

    request = LocalRequest("run", "ada", Request("score", "run"), "", "")
    waiting = pool.ask({"ada": request, "bea": request})
    assert process.busy.wait(150)
    pool.close()
    assert [future.cancelled() for future in waiting] == [False, True]
    assert process.asked == 1


class NoStem:
    """Starts nothing: the way leads nowhere, and the process has the worker's number."""

    def worker(self, log: IO[bytes], modules: Collection[str], number: int) -> tuple[socket.socket, int]:
        here, there = socket.socketpair()
        there.close()
        return here, number

    def close(self) -> None: ...


def test_a_worker_process_stays_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes on two GPUs: whichever site one of them serves, it is on GPU 0, 1 and 0."""
    monkeypatch.setattr(processes, "take", NoStem)
    monkeypatch.setattr(processes, "FORKS", True)
    with Pool(3) as pool:
        numbers = [process.pid for process in pool.processes]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device("auto", site) for site in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]  # in no worker
    for number, device in zip(numbers, ("cuda:0", "cuda:1", "cuda:0"), strict=True):
        monkeypatch.setenv(WORKER, str(number))
        assert {pick_device(wanted, site) for wanted in ("auto", "cuda") for site in range(4)} == {device}
