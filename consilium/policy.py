"""What a site allows: everything in a simulation, what its hospital.toml says in a hospital."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import hmac
import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from consilium import tree
from consilium.errors import DataError
from consilium.fields import plain
from consilium.files import append_lines, make_folder, write_bytes
from consilium.hospital import Limits, too_little_privacy
from consilium.messages import AnswerHead, Request
from consilium.privacy.dp import epsilon
from consilium.study import Study
from consilium.tree import Packet

KEY = 32  # bytes of a hospital's key
LOG = "left.jsonl"


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

    def check(self, study: Study) -> None:
        """`Refused` if the study may not run here."""
        ...

    def before(self, request: Request, study: Study) -> None:
        """`Refused` if a request is not even begun."""
        ...

    def let_go(self, request: Request, head: AnswerHead, packet: Packet | None, study: Study) -> None:
        """Write down what is about to leave; `Refused` if it may not."""
        ...


@dataclass(frozen=True)
class Permissive:
    """A simulated site without rules of its own: everything leaves, under its own name."""

    secret: bytes

    def alias(self, name: str) -> str:
        return name

    def check(self, study: Study) -> None: ...

    def before(self, request: Request, study: Study) -> None: ...

    def let_go(self, request: Request, head: AnswerHead, packet: Packet | None, study: Study) -> None: ...


def simulated_secret(study: Study, site: str) -> bytes:
    """A simulation has no secrets, and its noise must be the same when it is repeated."""
    return f"{study.plan.seed}|{site}".encode()


@dataclass(frozen=True)
class HospitalPolicy:
    """The rules of a hospital.toml, counted from the hospital's own log of what left."""

    limits: Limits
    labels: tuple[str, ...]  # what the hospital annotates, in the order of the mask values
    secret: bytes
    memory: Path  # the hospital's folder; its log is of all studies

    def alias(self, name: str) -> str:
        """A keyed hash of the whole name."""
        return hmac.new(self.secret, name.encode(), hashlib.sha256).hexdigest()[:16]

    def check(self, study: Study) -> None:
        if tuple(study.facts.labels) != self.labels:
            raise Refused("labels", f"the study has {study.facts.labels}, this hospital {self.labels}")
        if why := too_little_privacy(self.limits, study):
            raise Refused("privacy", why)

    def before(self, request: Request, study: Study) -> None:
        """What the log shows to be used up is refused before any work is done."""
        limits = self.limits
        past = list(left(self.memory))
        if not any(line["run"] == request.run for line in past):
            raise Refused("foreign", f"{request.do} of {request.run}, whose roll call was not answered here")
        if request.do == "train":
            assert request.round is not None
            if limits.rounds and request.round.index >= limits.rounds:
                raise Refused("rounds", f"an order of round {request.round.index + 1}")

    def let_go(self, request: Request, head: AnswerHead, packet: Packet | None, study: Study) -> None:
        size, digest = measured(packet)
        line: dict[str, Any] = {
            "time": now(),
            "run": request.run,
            "what": request.do,
            "round": request.round.index + 1 if request.round else None,
            "bytes": size,
            "sha256": digest,
            **({"noise": study.privacy.noise} if request.do == "train" else {}),
            "facts": plain(head),
        }
        with _locked(self.memory):
            past = list(left(self.memory))
            for word, why in self._objections(line, past, study):
                raise Refused(word, why)
            append_lines(json.dumps(line) + "\n", self.memory / LOG, durable=True, private=True)  # before it leaves

    def _objections(
        self, line: Mapping[str, Any], past: list[Mapping[str, Any]], study: Study
    ) -> Iterator[tuple[str, str]]:
        """Which limits would be passed; a message that left before, to the last bit, tells nothing new."""
        limits, run = self.limits, str(line["run"])
        here = [old for old in past if old["run"] == run]
        if limits.message_bytes and line["bytes"] > limits.message_bytes:
            yield "bytes", f"a message of {line['bytes']} bytes"
        for most, lines in ((limits.run_bytes, here), (limits.total_bytes, past)):
            before = sum(int(old["bytes"]) for old in lines)
            if most and before + line["bytes"] > most:
                yield "bytes", f"{line['bytes']} bytes after {before}"
        if line["what"] == "train":
            exchanges = study.exchanges if study.privacy.on else 0  # ε was told for so many
            for most, lines in ((limits.rounds, here), (exchanges, here), (limits.total_rounds, past)):
                count = len(_different("train", [*lines, line]))
                if most and count > most:
                    yield "rounds", f"update {count}"
            if limits.total_epsilon:
                spent = total_epsilon([*past, line], limits.delta)
                if spent > limits.total_epsilon:
                    yield "privacy", f"ε of all studies together would be {spent:.3g}"
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


def total_epsilon(lines: Iterable[Mapping[str, Any]], delta: float) -> float:
    """What all updates in a log have given away together: Gaussian mechanisms add their squared means."""
    noises = {(line["run"], line["sha256"]): float(line.get("noise", 0.0)) for line in lines if line["what"] == "train"}
    if not all(noises.values()):
        return math.inf
    mean = math.sqrt(math.fsum((2 / noise) ** 2 for noise in noises.values()))
    return epsilon(mean, delta) if mean else 0.0


def measured(packet: Packet | None) -> tuple[int, str]:
    """The bytes of a packet as it travels, and their SHA-256."""
    digest, size = hashlib.sha256(), 0
    for piece in tree.pieces(packet) if packet is not None else ():
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()


# ------------------------------------------------------------------------------------------ the log and the key


def left(memory: Path) -> Iterator[Mapping[str, Any]]:
    """Every message that left a hospital, of all studies; a line cut short by a crash is dropped."""
    for path in (memory / LOG, *sorted(memory.glob(f"*/{LOG}"))):  # version 0.1 had one log per run, in its folder
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            yield {"run": path.parent.name, **line}


@contextmanager
def _locked(memory: Path) -> Iterator[None]:
    """Two studies of one hospital count one after the other."""
    make_folder(memory, private=True, durable=True)
    with os.fdopen(os.open(memory / f".{LOG}.lock", os.O_RDWR | os.O_CREAT, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
