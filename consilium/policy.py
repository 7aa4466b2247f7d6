"""What a site allows: everything in a simulation, what its hospital.toml says in a hospital."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from consilium.left_log import LOG, append, check_chain, left, locked, of_run
from consilium.machine import peak_memory_mb
from consilium.messages import AnswerHead, Request
from consilium.privacy.ledger import as_json, ledger, total, within
from consilium.site import Spent
from consilium.stopwatch import Stopwatch
from consilium.store import say_once
from consilium.study import Study
from consilium.tree import Packet

KEY = 32  # bytes of a hospital's key


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
        limits = self.limits
        self._check_approval(study)  # it may have been withdrawn
        past = list(left(self.memory))
        if not any(line["run"] == request.run for line in past):
            raise Refused("foreign", f"{request.do} of {request.run}, whose roll call was not answered here")
        if request.do == "train":
            assert request.round is not None
            if limits.rounds and request.round.index >= limits.rounds:
                raise Refused("rounds", f"an order of round {request.round.index + 1}")
        for word, why in self._used_up(of_run(past, request.run)):
            raise Refused(word, why)

    def _used_up(self, here: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
        """Which caps on this machine are used up by now; `here` is what this run has sent."""
        limits = self.limits
        seconds = sum(float(line.get("facts", {}).get("seconds", 0.0)) for line in here)
        if limits.run_seconds and seconds > limits.run_seconds:
            yield "time", f"[limits] run_seconds = {limits.run_seconds:g}, and this run has worked for {seconds:.0f}."
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
        limits, run = self.limits, str(line["run"])
        here = of_run(past, run)
        if limits.message_bytes and line["bytes"] > limits.message_bytes:
            yield "bytes", f"a message of {line['bytes']} bytes"
        for most, lines in ((limits.run_bytes, here), (limits.total_bytes, past)):
            before = sum(int(old["bytes"]) for old in lines)
            if most and before + line["bytes"] > most:
                yield "bytes", f"{line['bytes']} bytes after {before}"
        if line["what"] == "train":
            exchanges = study.exchanges if study.privacy.by_update else 0  # ε was told for so many
            for most, lines in ((limits.rounds, here), (exchanges, here), (limits.total_rounds, past)):
                count = len(_different("train", [*lines, line]))
                if most and count > most:
                    yield "rounds", f"update {count}"
            yield from _over_target(line, here, study)
            for budget, lines, which in (
                (limits.epsilon if study.privacy.by_patient else 0.0, here, "this run"),
                (limits.total_epsilon, past, "all studies together"),
            ):
                entries = ledger([*lines, line]) if budget else []
                if budget and not within(entries, budget, limits.delta, study.privacy.accountant):
                    spent = total(entries, limits.delta, study.privacy.accountant)
                    yield "budget", f"ε of {which} would be {spent:.3g}, and hospital.toml allows {budget:g}"
        if line["what"] == "score":
            for most, lines in (
                (limits.scorings or 2 * study.scorings, here),
                (limits.total_scorings, past),
            ):
                count = len(_different("score", [*lines, line]))
                if most and count > most:
                    yield "scores", f"scoring {count}"


def _different(what: str, lines: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    return {(str(line["run"]), str(line["sha256"])) for line in lines if line["what"] == what}


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
