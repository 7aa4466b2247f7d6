"""What a site allows: everything in a simulation, what its hospital.toml says in a hospital."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from consilium import packet_files
from consilium.caps import held_by, too_large
from consilium.consent import APPROVED, Decisions, study_digest
from consilium.errors import DataError
from consilium.fields import plain
from consilium.files import make_folder, write_bytes
from consilium.hospital import Limits, too_little_privacy
from consilium.left_log import FAILED, LOG, append, check_chain, different, left, locked, of_run, of_study, seconds
from consilium.machine import peak_memory_mb
from consilium.messages import AnswerHead, Request
from consilium.privacy.ledger import as_json, ledger, total, within
from consilium.site import Spent
from consilium.stopwatch import Stopwatch
from consilium.store import say_once
from consilium.study import Study
from consilium.tree import Packet

KEY = 32  # bytes of a hospital's key
NO_RUN = "(none)"  # in the log: what was answered was no request


class Refused(Exception):
    """A request is not carried out; `word`, one of `REASONS`, is all that the server learns."""

    def __init__(self, word: str, why: str) -> None:
        super().__init__(why)
        self.word = word


class Policy(Protocol):
    """The rules of one site."""

    @property
    def secret(self) -> bytes:
        """Noise is drawn from it."""
        ...

    def alias(self, name: str) -> str:
        """A case's name as the server may read it."""
        ...

    @property
    def stopwatch(self) -> Stopwatch:
        """What one round may take."""
        ...

    def check(self, study: Study, cases: int) -> None:
        """`Refused` if the study may not run here, at a site with so many cases."""
        ...

    def check_cache(self, size: int) -> None:
        """`Refused` if the preprocessed images take too many bytes."""
        ...

    def before(self, request: Request, study: Study) -> None:
        """`Refused` if a request is not even begun."""
        ...

    def let_go(
        self, request: Request, head: AnswerHead, packet: Packet | None, study: Study, spent: Sequence[Spent] = ()
    ) -> None:
        """Write down what is about to leave, and what it costs its patients; `Refused` if it may not."""
        ...


@dataclass(frozen=True)
class Permissive:
    """A simulated site without rules of its own: everything leaves, under its own name.

    Of a private study it keeps a ledger in its folder, and it stops where the study's own ε is used up.
    """

    secret: bytes
    memory: Path | None = None

    def alias(self, name: str) -> str:
        return name

    @property
    def stopwatch(self) -> Stopwatch:
        return Stopwatch()

    def check(self, study: Study, cases: int) -> None: ...

    def check_cache(self, size: int) -> None: ...

    def before(self, request: Request, study: Study) -> None: ...

    def let_go(
        self, request: Request, head: AnswerHead, packet: Packet | None, study: Study, spent: Sequence[Spent] = ()
    ) -> None:
        if not study.privacy.on or self.memory is None:
            return
        line = _line(request, packet, spent)
        for word, why in _over_target(line, list(left(self.memory)), study):
            raise Refused(word, why)
        make_folder(self.memory)
        append(line, self.memory)


def simulated_secret(study: Study, site: str) -> bytes:
    """A simulation has no secrets, and its noise must be the same when it is repeated."""
    return f"{study.plan.seed}|{site}".encode()


def alias_of(name: str, secret: bytes) -> str:
    """A keyed hash of a whole name."""
    return hmac.new(secret, name.encode(), hashlib.sha256).hexdigest()[:16]


@dataclass(frozen=True)
class HospitalPolicy:
    """The rules of a hospital.toml, counted from the hospital's own log of what left."""

    limits: Limits
    labels: tuple[str, ...]  # what the hospital annotates, in the order of the mask values
    secret: bytes
    memory: Path  # the hospital's folder; its log is of all studies

    def alias(self, name: str) -> str:
        return alias_of(name, self.secret)

    @property
    def stopwatch(self) -> Stopwatch:
        return Stopwatch(self.limits.round_seconds)

    @property
    def decisions(self) -> Decisions:
        return Decisions(self.memory, self.secret)

    def check(self, study: Study, cases: int) -> None:
        if tuple(study.facts.labels) != self.labels:
            raise Refused("labels", f"the study has {study.facts.labels}, this hospital {self.labels}")
        if why := too_little_privacy(self.limits, study):
            raise Refused("privacy", why)
        for word, why in too_large(self.limits, study, cases):
            raise Refused(word, why)
        self._check_approval(study)

    def _check_approval(self, study: Study) -> None:
        """Whether a person here has approved exactly this study; one that nobody knows is kept for review."""
        if not self.limits.approval:
            return
        digest = study_digest(study)
        decision = self.decisions.of(digest)
        if decision is None:
            kept = self.decisions.keep_waiting(study)
            told = f"see `consilium federation review {digest[:12]}`" if kept else "too many wait already: not kept"
            raise Refused("approval", f"hospital.toml asks for approval of every study; {told}.")
        if decision.verdict != APPROVED:
            raise Refused("rejected", f"{decision.by} rejected study {digest[:12]} on {decision.time}: {decision.why}")

    def check_cache(self, size: int) -> None:
        if self.limits.cache_bytes and size > self.limits.cache_bytes:
            most = self.limits.cache_bytes
            raise Refused("cache", f"[limits] cache_bytes = {most}, and the preprocessed images take {size}.")

    def before(self, request: Request, study: Study) -> None:
        """What the log shows to be used up is refused before any work is done."""
        self._check_approval(study)  # it may have been withdrawn
        past = list(left(self.memory))
        if not any(line["run"] == request.run for line in past if line["what"] != FAILED):
            raise Refused("foreign", f"{request.do} of {request.run}, whose roll call was not answered here")
        for word, why in (*self._spent_before(request, past), *self._used_up(of_study(past, request.run))):
            raise Refused(word, why)

    def _spent_before(self, request: Request, past: list[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
        """Which budgets have nothing left; a round that was answered before may be repeated to the last bit."""
        number = request.round.index + 1 if request.round else None
        if any((line["what"], line["run"], line.get("round")) == (request.do, request.run, number) for line in past):
            return
        for word, what, key, most, lines in self._counted(past, request.run):
            if what == request.do and most and different(what, lines) >= most:
                yield word, f"[limits] {key} = {most}, and so many have left"

    def _counted(
        self, past: list[Mapping[str, Any]], run: str
    ) -> Iterator[tuple[str, str, str, int, list[Mapping[str, Any]]]]:
        """Word, kind of message, key, limit and lines of every budget that counts messages."""
        limits, study = self.limits, of_study(past, run)
        yield "rounds", "train", "rounds", limits.rounds, past
        yield "rounds", "train", "study_rounds", limits.study_rounds, study
        yield "scores", "score", "scorings", limits.scorings, past
        yield "scores", "score", "study_scorings", limits.study_scorings, study

    def _used_up(self, here: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
        """Which caps on this machine are used up by now; `here` is what this study has sent."""
        limits = self.limits
        if limits.study_seconds and (worked := seconds(here)) > limits.study_seconds:
            yield (
                "time",
                f"[limits] study_seconds = {limits.study_seconds:g}, and this study has worked for {worked:.0f}.",
            )
        peak = int(peak_memory_mb() * 2**20)
        if limits.memory_bytes and peak > limits.memory_bytes:
            yield "ram", f"[limits] memory_bytes = {limits.memory_bytes}, and this process has held {peak}."
        if limits.disk_bytes and (size := held_by(self.memory)) > limits.disk_bytes:
            yield "storage", f"[limits] disk_bytes = {limits.disk_bytes}, and {self.memory} holds {size}."

    def let_go(
        self, request: Request, head: AnswerHead, packet: Packet | None, study: Study, spent: Sequence[Spent] = ()
    ) -> None:
        line = {**_line(request, packet, spent), "facts": plain(head)}
        with locked(self.memory):
            past = list(left(self.memory))
            if faults := check_chain(self.memory).faults:
                say_once(f"{self.memory / LOG}: {faults[0]}; what is missing is counted as if it had cost the most.")
            for word, why in self._objections(line, past, study):
                raise Refused(word, why)
            append(line, self.memory, durable=True, private=True)  # before it leaves

    def _objections(
        self, line: Mapping[str, Any], past: list[Mapping[str, Any]], study: Study
    ) -> Iterator[tuple[str, str]]:
        """Which limits would be passed; a message that left before, to the last bit, tells nothing new."""
        limits, run, what = self.limits, str(line["run"]), line["what"]
        here, of_this = of_run(past, run), of_study(past, run)
        if limits.message_bytes and line["bytes"] > limits.message_bytes:
            yield "bytes", f"[limits] message_bytes = {limits.message_bytes}, and the message has {line['bytes']}"
        for key, most, lines in (("bytes", limits.bytes, past), ("study_bytes", limits.study_bytes, of_this)):
            before = sum(int(old["bytes"]) for old in lines)
            if most and before + line["bytes"] > most:
                yield "bytes", f"[limits] {key} = {most}, and it would be {line['bytes']} after {before}"
        for word, kind, key, most, lines in self._counted(past, run):
            count = different(what, [*lines, line])
            if kind == what and most and count > most:
                yield word, f"[limits] {key} = {most}, and this would be number {count}"
        if what == "train":
            if study.privacy.by_update and different(what, [*here, line]) > study.exchanges:
                yield "rounds", f"the study told its ε for {study.exchanges} updates, and this would be one more"
            yield from _over_target(line, here, study)
            yield from self._over_budget(line, past, study)
        if what == "score" and not limits.study_scorings and different(what, [*here, line]) > 2 * study.scorings:
            yield "scores", f"the study asks for {study.scorings} scorings, and there were twice as many"

    def _over_budget(
        self, line: Mapping[str, Any], past: list[Mapping[str, Any]], study: Study
    ) -> Iterator[tuple[str, str]]:
        """Whether an update would take the hospital, or its part in a study, over its own ε."""
        limits, accountant = self.limits, study.privacy.accountant
        for key, most, lines, which in (
            ("epsilon", limits.epsilon, past, "all studies together"),
            ("study_epsilon", limits.study_epsilon, of_study(past, str(line["run"])), "this study"),
        ):
            entries = ledger([*lines, line]) if most else []
            if most and not within(entries, most, limits.delta, accountant):
                spent = total(entries, limits.delta, accountant)
                yield "budget", f"ε of {which} would be {spent:.3g}, and [limits] {key} = {most:g}"


def _line(request: Request, packet: Packet | None, spent: Sequence[Spent]) -> dict[str, Any]:
    """What the log says of a message."""
    size, digest = measured(packet)
    return {
        "time": now(),
        "run": request.run,
        "what": request.do,
        "round": request.round.index + 1 if request.round else None,
        "bytes": size,
        "sha256": digest,
        "spent": as_json(spent),
    }


def log_failure(memory: Path, request: Request | None, head: AnswerHead) -> AnswerHead:
    """Write down an answer that is nothing but a reason, and what was measured: it leaves too.

    Where the log cannot be written, one word leaves and nothing that was measured.
    """
    facts = {"run": request.run if request else NO_RUN, "what": FAILED, "asked": request.do if request else ""}
    number = request.round.index + 1 if request and request.round else None
    line: dict[str, Any] = {
        "time": now(),
        **facts,
        "round": number,
        "bytes": 0,
        "sha256": measured(None)[1],
        "spent": [],
    }
    try:
        with locked(memory):
            append({**line, "facts": plain(head)}, memory, durable=True, private=True)
    except OSError:
        return AnswerHead("disk")
    return head


def _over_target(line: Mapping[str, Any], past: list[Mapping[str, Any]], study: Study) -> Iterator[tuple[str, str]]:
    """Whether a message would take a run over the ε that its study promises."""
    privacy = study.privacy
    if not privacy.epsilon or line["what"] != "train":
        return
    entries = ledger([*past, line])
    if not within(entries, privacy.epsilon, privacy.delta, privacy.accountant):
        spent = total(entries, privacy.delta, privacy.accountant)
        yield "budget", f"ε of this run would be {spent:.3g}, and the study promises {privacy.epsilon:g}"


def measured(packet: Packet | None) -> tuple[int, str]:
    """The bytes of a packet as it travels, and their SHA-256."""
    digest, size = hashlib.sha256(), 0
    for piece in packet_files.pieces(packet) if packet is not None else ():
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()


# ------------------------------------------------------------------------------------------ the key


def read_key(path: Path) -> bytes:
    """The hospital's key, made once and never sent; one that is not whole is refused, never replaced."""
    if not path.exists():
        make_folder(path.parent, private=True, durable=True)
        write_bytes(secrets.token_hex(KEY).encode(), path, durable=True, private=True)
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY:
        raise DataError(
            f"{path} is not a whole key of {KEY} bytes: restore it from a backup. A new one, made if you remove it, "
            "gives every case another alias, and memories and logs of runs under way no longer go with it."
        )
    return key


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
