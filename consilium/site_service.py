"""One site of one run: the same object answers behind every wire, in a simulation and in a hospital.

It knows neither network nor files of the wire: a request and an order come in, an answer goes out. What the site
allows is its policy; what leaves passes the steps of `outgoing`.
"""

from __future__ import annotations

import errno
import re
import threading
import time
import tomllib
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from consilium.data.site_folder import Federation
from consilium.errors import DataError, RunError, StudyError, UserError, WorkError
from consilium.files import append_lines, make_folder, write_bytes
from consilium.left_lines import now
from consilium.machine import peak_memory_mb
from consilium.messages import AnswerHead, Request, roster_of
from consilium.outgoing import Outgoing, SiteRules, leave
from consilium.policy import Policy, Refused
from consilium.privacy.dp import NotFinite, refuse_not_finite
from consilium.site import Round
from consilium.site_opening import open_at, site_facts
from consilium.stopwatch import OverTime
from consilium.study import Study
from consilium.timeline import timeline
from consilium.tree import Packet, PacketError
from consilium.weights import SiteName
from consilium.worker import Worker


@dataclass(frozen=True)
class SiteAnswer:
    """What a site answers. All but head and packet stays on its machine."""

    head: AnswerHead
    packet: Packet | None = None
    why: str = ""  # in words: what failed
    mistake: bool = False  # the user's: the words are all there is to say
    full: bool = False  # the disk is
    log: str = ""  # where the traceback is


@dataclass(frozen=True)
class OpenedStudy:
    """A study as the site runs it, with the data it may see."""

    study: Study
    federation: Federation
    hash: str  # of the study as it was submitted: a hospital runs it on its own device


@dataclass
class SiteService:
    """Card, train, score, deliver; one at a time, with data and networks kept from request to request."""

    site: SiteName
    open: Callable[[], OpenedStudy]  # reads the study; `Refused` if the site does not take part in it
    place: Callable[[str], Path]  # the site's own folder for a run
    policy: Callable[[Study], Policy]
    errors: Callable[[], Path]  # the site's own log of what failed
    check_release: Callable[[Request, Packet], None] = lambda request, packet: None  # `Refused` if it is not signed
    log_failure: Callable[[Request, AnswerHead], AnswerHead] = lambda request, head: head  # what leaves of a failure
    hospital: bool = False  # what it stores is durable and private; its mistakes are in its log only

    _lock: threading.Lock = field(default_factory=threading.Lock)  # one thing at a time, whatever the network does
    _opened: OpenedStudy | None = None
    _policy: Policy | None = None
    _worker: Worker | None = None
    _run: str = ""
    _last: int = -1  # the latest round it was asked for

    def answer(self, request: Request, order: Callable[[], Packet]) -> SiteAnswer:
        """Do what is asked; a failure is part of the answer, never an exception."""
        start = time.perf_counter()
        measure = partial(_measured, start)
        with self._lock:
            try:
                out = self._do(request, order, measure)
                return SiteAnswer(out.head, out.packet)
            except Exception as error:
                return self.failed(error, request, measure())

    def _do(self, request: Request, order: Callable[[], Packet], measure: Callable[[], AnswerHead]) -> Outgoing:
        opened, policy = self._open()
        self._check_run(request, opened)
        if request.do == "card":
            opened.study.task.shape()  # imports what the first round needs, so that its deadline is for training
            facts, size = site_facts(opened.study, opened.federation, self.site)
            policy.check_cache(size)
            return leave(replace(facts, study=opened.hash), measure(), SiteRules(opened.study, policy), request)
        if request.round is None or request.method != opened.study.method_name:
            raise Refused("foreign", f"a request without a round, or of method {request.method}")
        if request.do == "train":
            self._check_round(request.round, opened.study)
        policy.before(request, opened.study)
        packet = order()
        if request.header:
            packet = packet._replace(header=request.header)
        refuse_not_finite(packet, f"an order to {request.do}")  # no clip is small enough for what is not a number
        worker = self._open_worker(request, opened, policy)
        worker.stopwatch.start()
        if request.do == "train":
            self._last = request.round.index
            try:
                return worker.train(packet, request, measure)
            except RunError:  # its memory is damaged: the round that made it may be asked for again
                self._last = min(self._last, max(-1, request.merged))
                raise
        if request.do == "score":
            return worker.score(packet, request, measure)
        self.check_release(request, packet)
        if self.hospital:
            make_folder(worker.place, private=True, durable=True)
            write_bytes(opened.study.to_toml().encode(), worker.place / "study.toml", durable=True, private=True)
        return worker.deliver(packet, request, measure)

    # ------------------------------------------------------------------------------------ what may be asked

    def _check_run(self, request: Request, opened: OpenedStudy) -> None:
        """A run is called after its study: under another's name its memory could be asked for."""
        own = f"{opened.study.name}-s{opened.study.plan.seed}-{opened.hash}"
        if self.hospital and not re.fullmatch(rf"{re.escape(own)}(-[0-9]+)?", request.run):
            raise Refused("foreign", f"run {request.run} is not of study {own}")
        if self._run not in ("", request.run):
            raise Refused("foreign", f"run {request.run} in a job of run {self._run}")
        self._run = request.run

    def _check_round(self, round: Round, study: Study) -> None:
        line = timeline(study.method, study.plan.rounds, study.plan.score_every)
        if round.index >= len(line) or line[round.index][1] != round:
            raise Refused("foreign", f"the study has no {round}")
        if round.index < self._last:
            raise Refused("old", f"an order of round {round.index + 1} after one of round {self._last + 1}")

    # ------------------------------------------------------------------------------------ opening

    def _open(self) -> tuple[OpenedStudy, Policy]:
        if self._opened is None or self._policy is None:
            opened = self.open()
            policy = self.policy(opened.study)
            own = opened.federation.sites.get(self.site)  # the virtual site of pooled training has no rules
            policy.check(opened.study, len(own.cases) if own else 0)
            self._opened, self._policy = opened, policy
        return self._opened, self._policy

    def _open_worker(self, request: Request, opened: OpenedStudy, policy: Policy) -> Worker:
        if self._worker is None:
            roster = roster_of(request.roster)
            place = self.place(request.run)
            self._worker = open_at(
                opened.study, opened.federation, self.site, roster, place, policy, hospital=self.hospital
            )
        return self._worker

    # ------------------------------------------------------------------------------------ failing

    def failed(self, error: Exception, request: Request, head: AnswerHead | None = None) -> SiteAnswer:
        """The answer that something failed: one word for the server, and the reason in the site's own log."""
        head = self.log_failure(request, replace(head or AnswerHead(), error=word_of(error)))
        mistake = isinstance(error, UserError)
        rule = isinstance(error, Refused) or word_of(error) == "method"  # of the hospital, and no bug
        why = str(error) if mistake or rule else f"{type(error).__name__}: {error}"
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if mistake and not self.hospital:
            return SiteAnswer(head, why=why, mistake=True)
        where = f", {request.round.phase} round {request.round.step + 1}" if request.round else ""
        details = f"{why}\n" if rule else traceback.format_exc()
        text = f"{now()} {request.do} of {request.run}{where}: answered '{head.error}'\n{details}\n"
        return SiteAnswer(
            head, why=why, mistake=mistake, full=full, log=write_error(text, self.errors(), self.hospital)
        )


def write_error(text: str, path: Path, private: bool) -> str:
    """Keep a traceback in the site's own log; returns the file, or nothing where it could not be written."""
    try:
        make_folder(path.parent, private=private)
        append_lines(text, path, private=private)
    except OSError:
        return ""  # a full disk must not hide the first failure
    return str(path)


def _measured(start: float) -> AnswerHead:
    return AnswerHead(seconds=time.perf_counter() - start, memory_mb=peak_memory_mb())


def word_of(error: Exception) -> str:
    """The word of `REASONS` that a failure is told as."""
    if isinstance(error, Refused):
        return error.word
    if isinstance(error, PermissionError) and error.errno is None:
        return "method"
    if isinstance(error, OverTime):
        return "time"
    if isinstance(error, WorkError) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return "disk"
    words = {
        PacketError: "damaged",
        NotFinite: "infinite",
        DataError: "data",
        RunError: "memory",
        StudyError: "study",
        tomllib.TOMLDecodeError: "study",
    }
    return next((word for kind, word in words.items() if isinstance(error, kind)), "failed")
