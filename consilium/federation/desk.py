"""A hospital's desk: every request of the server is answered here, or refused, and all that leaves is written down."""

from __future__ import annotations

import datetime
import errno
import hashlib
import hmac
import json
import secrets
import threading
import time
import tomllib
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from consilium import tree
from consilium.data.preprocess import fingerprint
from consilium.data.site_folder import Federation
from consilium.envelope import Envelope, card_from_json
from consilium.errors import DataError, RunError, StudyError, WorkError
from consilium.federation.hospital import Hospital
from consilium.files import append_lines, make_folder, write_bytes
from consilium.machine import peak_memory_mb, pick_device
from consilium.scores import COLUMNS, write_rows
from consilium.study import Study
from consilium.tree import Packet, PacketError
from consilium.wires import held
from consilium.wires.flare import Answer, Body
from consilium.worker import Worker, open_worker, site_facts


class Refusal(Exception):
    """A request is not carried out; `word` is all that the server learns."""

    def __init__(self, word: str, why: str) -> None:
        super().__init__(why)
        self.word = word


class Desk:
    """One hospital in one run; data stay loaded from round to round."""

    def __init__(self, hospital: Hospital, kit: str, text: str) -> None:
        self.hospital, self.kit, self.text = hospital, kit, text
        self._lock = threading.Lock()  # one thing at a time, whatever the network does
        self._study: Study | None = None
        self._federation: Federation | None = None
        self._worker: Worker | None = None
        self._run = ""
        self._last = -1
        self._held: dict[str, dict[str, Tensor]] = {}  # by what was asked: the last packet's tensors, by content
        self._key = _key(Path(hospital.memory) / "key")

    def answer(self, request: Mapping[str, Any], body: Body) -> Answer:
        """Do what is asked; a failure is one word here and a traceback in the hospital's own log."""
        start = time.perf_counter()
        with self._lock:
            try:
                facts, out = self._do(request, body)
                facts = {**facts, "seconds": time.perf_counter() - start, "memory_mb": peak_memory_mb()}
                self._let_go(request, facts, out)
                return Answer(facts, out)
            except Exception as error:
                word = _word(error)
                self._write_down(request, word)
                return Answer({"seconds": time.perf_counter() - start, "memory_mb": peak_memory_mb()}, error=word)

    # ------------------------------------------------------------------------------------ what may be asked

    def _do(self, request: Mapping[str, Any], body: Body) -> tuple[dict[str, Any], bytes]:
        if request.get("site") != self.hospital.site or self._run not in ("", request.get("run")):
            raise Refusal("foreign", f"a message for site {request.get('site')}, run {request.get('run')}")
        self._run = _plain_name(str(request["run"]))
        if request["do"] == "card":
            return self._card(), b""
        head = self._head(request)
        packet = self._packet(request, body)
        worker = self._open(request)
        if request["do"] == "train":
            return {}, tree.to_bytes(self._train(worker, packet, head))
        if request["do"] == "score":
            return {}, (",".join(COLUMNS) + "\n" + write_rows(worker.score(packet, head))).encode()
        if request["do"] == "deliver":
            worker.deliver(packet, head)
            text = self._read()[0].to_toml()
            write_bytes(text.encode(), worker.place / "study.toml", durable=True, private=True)
            return {}, b""
        raise Refusal("foreign", f"nobody knows how to do '{request['do']}'")

    def _card(self) -> dict[str, Any]:
        study, federation = self._read()
        study.task.shape()  # imports what the first round needs, so that its deadline is for training
        facts = site_facts(self.hospital.on_own_device(study), federation, self.hospital.site)
        hidden = {key: self.alias(str(facts[key])) for key in ("table", "arrays")}  # hashes of names and pixels
        return {**facts, **hidden, "method": study.hash, "preprocessing": fingerprint(study.preprocess)}

    def _head(self, request: Mapping[str, Any]) -> Envelope:
        head = Envelope.from_json(request["head"])
        if head.run != self._run or head.method != self._read()[0].method_name:
            raise Refusal("foreign", f"an order of run {head.run}, method {head.method}")
        return head

    def _packet(self, request: Mapping[str, Any], body: Body) -> Packet:
        """What was sent, with what was left out because it is here; tensors stay in their files."""
        place = self.hospital.place(self._run)
        make_folder(place, private=True)
        path = place / "order.safetensors"
        write_bytes(body, path, private=True)
        here = {name: tensor for part in self._held.values() for name, tensor in part.items()}
        try:
            packet = held.completed(tree.read(path), request["tensors"], here)
        except PacketError as error:
            raise Refusal("damaged", f"an order of {len(body)} bytes: {error}") from error
        self._held[request["do"]] = {request["tensors"][name]: tensor for name, tensor in packet.tensors.items()}
        return packet

    def _train(self, worker: Worker, packet: Packet, head: Envelope) -> Packet:
        if head.round.index < self._last:
            raise Refusal("old", f"an order of round {head.round.index + 1} after one of round {self._last + 1}")
        if self.hospital.limits.rounds and head.round.index >= self.hospital.limits.rounds:
            raise Refusal("rounds", f"an order of round {head.round.index + 1}")
        self._last = head.round.index
        return worker.train(packet, head)

    # ------------------------------------------------------------------------------------ the study and the data

    def _read(self) -> tuple[Study, Federation]:
        if self._study is None or self._federation is None:
            try:
                study = self.hospital.study(self.text)
            except (StudyError, tomllib.TOMLDecodeError) as error:
                raise Refusal("study", str(error)) from error
            if tuple(study.facts.labels) != self.hospital.labels:
                raise Refusal("labels", f"the study has {study.facts.labels}, this hospital {self.hospital.labels}")
            if too_little := self.hospital.too_little_privacy(study):
                raise Refusal("privacy", too_little)
            federation = self.hospital.federation(study.facts)
            if not self.kit == self.hospital.site == next(iter(federation.sites)):
                named = f"kit {self.kit}, hospital.toml {self.hospital.site}, site.toml {next(iter(federation.sites))}"
                raise Refusal("name", f"the names differ: {named}")
            try:
                pick_device(self.hospital.device, 0)
            except StudyError as error:
                raise Refusal("device", str(error)) from error
            self._study, self._federation = study, federation
        return self._study, self._federation

    def _open(self, request: Mapping[str, Any]) -> Worker:
        if self._worker is None:
            study, federation = self._read()
            roster = {name: card_from_json(card) for name, card in request["roster"].items()}
            place = self.hospital.place(self._run)
            own = self.hospital.on_own_device(study)
            self._worker = open_worker(own, federation, self.hospital.site, roster, place, True, self.alias, self._key)
        return self._worker

    def alias(self, case: str) -> str:
        """A case's name as the server may read it; slices keep their number, so that a volume's stay together."""
        name, number, index = case.partition("#")
        return hmac.new(self._key, name.encode(), hashlib.sha256).hexdigest()[:16] + number + index

    # ------------------------------------------------------------------------------------ what leaves

    def _let_go(self, request: Mapping[str, Any], facts: Mapping[str, Any], body: bytes) -> None:
        """Write down what is about to leave; beyond the hospital's limits it does not."""
        log = self.hospital.place(self._run) / "left.jsonl"
        make_folder(log.parent, private=True, durable=True)
        limits = self.hospital.limits
        if limits.message_bytes and len(body) > limits.message_bytes:
            raise Refusal("bytes", f"an answer of {len(body)} bytes")
        if limits.run_bytes and left_so_far(log) + len(body) > limits.run_bytes:
            raise Refusal("bytes", f"an answer of {len(body)} bytes after {left_so_far(log)}")
        digest = hashlib.sha256(body).hexdigest()
        if request["do"] == "train" and self._read()[0].privacy.on:
            before = {line["sha256"] for line in left(log) if line["what"] == "train"}
            if len(before - {digest}) >= self._read()[0].exchanges:  # ε was told for so many
                raise Refusal("rounds", f"an update beyond the {len(before)} that the study's ε is for")
        head = request.get("head") or {}
        line = {
            "time": _now(),
            "what": request["do"],
            "round": head["round"]["index"] + 1 if head else None,
            "bytes": len(body),
            "sha256": digest,
            "facts": dict(facts),
        }
        append_lines(json.dumps(line) + "\n", log, durable=True, private=True)  # before it leaves

    def _write_down(self, request: Mapping[str, Any], word: str) -> None:
        try:
            place = Path(self.hospital.memory)
            make_folder(place, private=True)
            what = f"{request.get('do')}, run {self._run or request.get('run')}: answered '{word}'"
            append_lines(f"{_now()} {what}\n{traceback.format_exc()}\n", place / "errors.log", private=True)
        except OSError:
            pass  # a full disk must not hide the first failure


def left_so_far(log: Path) -> int:
    """Bytes that a run has taken out of this hospital."""
    return sum(int(line["bytes"]) for line in left(log))


def left(log: Path) -> list[Mapping[str, Any]]:
    """Every message of a run that left; a line cut short by a crash is dropped."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _word(error: Exception) -> str:
    if isinstance(error, Refusal):
        return error.word
    if isinstance(error, PermissionError) and error.errno is None:
        return "method"
    if isinstance(error, WorkError) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return "disk"
    if isinstance(error, DataError):
        return "data"
    if isinstance(error, RunError):
        return "memory"
    return "failed"


def _key(path: Path) -> bytes:
    """The hospital's secret, made once and never sent."""
    if not path.exists():
        make_folder(path.parent, private=True, durable=True)
        write_bytes(secrets.token_hex(32).encode(), path, durable=True, private=True)
    return bytes.fromhex(path.read_text(encoding="ascii"))


def _plain_name(run: str) -> str:
    if not run or run.startswith(".") or "/" in run or "\\" in run:
        raise Refusal("foreign", f"a run cannot be called {run!r}")
    return run


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
