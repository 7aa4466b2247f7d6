"""Sites in worker processes: any process serves any site, since a site's memory is on disk and its data are mapped."""

from __future__ import annotations

import contextlib
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeVar

from consilium import tree
from consilium.machine import default_workers
from consilium.messages import AnswerHead
from consilium.study import Study
from consilium.weights import SiteName
from consilium.wires.local_sites import LocalAnswer, LocalRequest
from consilium.wires.simulated import SimulatedWire
from consilium.wires.stem import FORKS, Stem, last_line, take

T = TypeVar("T")


class _Process:
    """One worker process, started when first needed and again after it died."""

    def __init__(self, stem: Stem, modules: Collection[str], number: int) -> None:
        self._stem, self._modules, self._number = stem, modules, number
        self._connection: socket.socket | None = None
        self._answers: IO[str] | None = None
        self._pid = 0
        self.opened: set[tuple[str, SiteName]] = set()  # runs and sites that it has served and keeps open
        self._told: dict[str, str] = {}  # by run: the roster, which is told once; of many sites it is long
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process

    def ask(self, request: LocalRequest) -> LocalAnswer:
        try:
            connection, answers = self._running()
            self.opened.add((request.folder, request.site))
            connection.sendall((tree.to_text(self._without_roster(request)) + "\n").encode())
            line = answers.readline()
        except (OSError, ValueError):  # it is dead, or was stopped while we waited
            line = ""
        if not line:
            self.stop()
            why = f"the worker process died ({self._last_words()})"
            return LocalAnswer(AnswerHead("gone"), why, died=True)
        return tree.from_text(line, LocalAnswer)

    def _without_roster(self, asked: LocalRequest) -> LocalRequest:
        """The request as it is sent: the process remembers the roster of a run (`LocalSites`)."""
        if asked.request is None:
            self._told.pop(asked.folder, None)
        elif asked.request.roster and self._told.get(asked.folder) == asked.request.roster:
            return replace(asked, request=replace(asked.request, roster=""))
        elif asked.request.roster:
            self._told[asked.folder] = asked.request.roster
        return asked

    def _running(self) -> tuple[socket.socket, IO[str]]:
        if self._connection is None or self._answers is None:
            self._connection, self._pid = self._stem.worker(self._log, self._modules, self._number)
            self._answers = self._connection.makefile("r", encoding="utf-8")
        return self._connection, self._answers

    @property
    def running(self) -> bool:
        return self._connection is not None

    @property
    def pid(self) -> int:
        self._running()
        return self._pid

    def _last_words(self) -> str:
        return last_line(self._log) or self._stem.last_words() or "it was killed or ran out of memory"

    def stop(self) -> None:
        connection, self._connection = self._connection, None  # taken first: the thread that waits stops it too
        answers, self._answers = self._answers, None
        self.opened.clear()
        self._told.clear()
        if connection is not None:
            with contextlib.suppress(OSError):  # it may be dead already
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):  # its end closes when all of its threads have ended
                    pass
            if answers is not None:
                answers.close()
            connection.close()

    def forget(self) -> None:
        self._log.close()


class Pool:
    """Worker processes that outlive a run, so that the next run need not import torch again."""

    def __init__(self, size: int) -> None:
        self._closed = False
        self._modules: set[str] = set()
        self._stems = [take()] if FORKS else [Stem() for _ in range(size)]
        self.processes = [_Process(self._stems[i % len(self._stems)], self._modules, i) for i in range(size)]
        self._idle: queue.Queue[_Process] = queue.Queue()
        self._waiting: list[tuple[Future[LocalAnswer], LocalRequest]] = []
        self._lock = threading.Lock()  # of the list
        for process in self.processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(size)

    def need(self, modules: Collection[str]) -> None:
        """What processes that start from now on will have imported."""
        self._modules.update(modules)

    def ask(self, requests: Mapping[SiteName, LocalRequest]) -> dict[Future[LocalAnswer], SiteName]:
        """The answers to come, of several runs in any order; whoever stops listening early cancels them."""
        asked = [(Future[LocalAnswer](), request) for request in requests.values()]
        with self._lock:
            self._waiting += asked
        for _ in asked:
            self._threads.submit(self._serve_next)
        return {future: name for (future, _), name in zip(asked, requests, strict=True)}

    def _serve_next(self) -> None:
        process = self._idle.get()
        try:
            with self._lock:
                if not self._waiting:  # the pool was closed
                    return
                future, request = self._waiting.pop(place_for(process.opened, [asked for _, asked in self._waiting]))
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._ask(process, request))
                except BaseException as error:
                    future.set_exception(error)
        finally:
            self._idle.put(process)

    def _ask(self, process: _Process, request: LocalRequest) -> LocalAnswer:
        answer = process.ask(request)
        if answer.died and request.request and request.request.do != "train" and not self._closed:
            answer = process.ask(request)  # scoring changes nothing, so it can be asked again
        return answer

    def tell_all(self, request: LocalRequest) -> None:
        """Ask every process that runs and is free now."""
        free = []
        with contextlib.suppress(queue.Empty):
            while True:
                free.append(self._idle.get_nowait())
        for process in free:
            if process.running:
                process.ask(request)
                process.opened = {(folder, site) for folder, site in process.opened if folder != request.folder}
            self._idle.put(process)

    def close(self) -> None:
        """End the processes; whoever still waits for one of them is told that it died."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left, self._waiting = self._waiting, []
        for future, _ in left:
            future.cancel()
        for process in self.processes:
            process.stop()
        self._threads.shutdown()
        for process in self.processes:
            process.stop()  # one that a thread had just begun to start
            process.forget()
        for stem in self._stems:
            stem.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


def place_for(opened: Collection[tuple[str, SiteName]], waiting: Sequence[LocalRequest]) -> int:
    """Where a free process finds its next request: of a site that it has open, or the first; to open one takes time."""
    own = (i for i, asked in enumerate(waiting) if (asked.folder, asked.site) in opened)
    return next(own, 0)


def held_back(answers: Iterator[T], count: int, processes: int, urgent: Callable[[T], bool]) -> Iterator[T]:
    """The answers once a process has nothing left to do: before, whoever looks at them takes a core from a site."""
    waiting = []
    for number, answer in enumerate(answers, start=1):
        waiting.append(answer)
        if count - number < processes or urgent(answer):
            yield from waiting
            waiting = []


class Processes(SimulatedWire):
    """A federation whose sites share a pool of worker processes."""

    def __init__(self, study: Study, folder: Path, pool: Pool) -> None:
        super().__init__(study, folder)
        pool.need(modules_for(study))
        self._pool = pool
        self._open: dict[Future[LocalAnswer], SiteName] = {}

    def ask(self, requests: Mapping[SiteName, LocalRequest]) -> Iterator[tuple[SiteName, LocalAnswer]]:
        self._open = asked = self._pool.ask(requests)
        answers = as_completed(asked)
        size = len(self._pool.processes)
        if size >= default_workers():
            answers = held_back(answers, len(asked), size, lambda future: bool(future.result().head.error))
        return ((asked[future], future.result()) for future in answers)

    def close(self) -> None:
        for future in self._open:
            future.cancel()  # nobody listens any more; what a process is at, it ends
        self._pool.tell_all(LocalRequest(str(self.folder), "", None, "", ""))
        super().close()


def modules_for(study: Study) -> list[str]:
    """What a study's sites import beside what all need, so that it is imported once and not by every process."""
    by_monai = type(study.network).__module__ == "consilium.networks.monai_nets"
    return ["monai"] if by_monai or study.task_fields.augment or study.task_fields.patch else []
