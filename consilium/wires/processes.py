"""Sites in worker processes: any process serves any site, since a site's memory is on disk and its data are mapped."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, TypeVar

from consilium import tree
from consilium.children import TRAINING, environment
from consilium.machine import default_workers
from consilium.messages import AnswerHead
from consilium.study import Study
from consilium.weights import SiteName
from consilium.wires.local_sites import LocalAnswer, LocalRequest
from consilium.wires.simulated import SimulatedWire

T = TypeVar("T")


class _Process:
    """One worker process, started when first needed and again after it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process

    def ask(self, request: LocalRequest) -> LocalAnswer:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(tree.to_text(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # it is dead, or was stopped while we waited
            line = ""
        if not line:
            self.stop()
            why = f"the worker process died ({self._last_words()})"
            return LocalAnswer(AnswerHead("gone"), why, died=True)
        return tree.from_text(line, LocalAnswer)

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "consilium.wires.site_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=environment(TRAINING),
            )
        return self._process

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return self._running().pid

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it was killed or ran out of memory"

    def stop(self) -> None:
        process, self._process = self._process, None  # taken first: the thread that waits for its answer stops it too
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):  # it may be dead already
                process.stdin.close()
            process.wait()
            process.stdout.close()

    def forget(self) -> None:
        self._log.close()


class Pool:
    """Worker processes that outlive a run, so that the next run need not import torch again."""

    def __init__(self, size: int) -> None:
        self._closed = False
        self.processes = [_Process() for _ in range(size)]
        self._idle: queue.Queue[_Process] = queue.Queue()
        for process in self.processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(size)

    def ask(self, requests: Mapping[SiteName, LocalRequest]) -> dict[Future[LocalAnswer], SiteName]:
        """The answers to come, of several runs in any order; whoever stops listening early cancels them."""
        return {self._threads.submit(self._ask, request): name for name, request in requests.items()}

    def _ask(self, request: LocalRequest) -> LocalAnswer:
        process = self._idle.get()
        try:
            answer = process.ask(request)
            if answer.died and request.request and request.request.do != "train" and not self._closed:
                answer = process.ask(request)  # scoring changes nothing, so it can be asked again
            return answer
        finally:
            self._idle.put(process)

    def tell_all(self, request: LocalRequest) -> None:
        """Ask every process that runs and is free now."""
        free = []
        with contextlib.suppress(queue.Empty):
            while True:
                free.append(self._idle.get_nowait())
        for process in free:
            if process.running:
                process.ask(request)
            self._idle.put(process)

    def close(self) -> None:
        """End the processes; whoever still waits for one of them is told that it died."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self.processes:
            process.stop()
        self._threads.shutdown()
        for process in self.processes:
            process.stop()  # one that a thread had just begun to start
            process.forget()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


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
