"""Tools of the contract tests: runs that are interrupted, wires that lose replies, hashes of messages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from consilium import engine, tree
from consilium.messages import Envelope, Reply
from consilium.method import timeline
from consilium.run_folder import RunFolder
from consilium.simulation import Result
from consilium.study import Study
from consilium.tree import Packet, flatten, unflatten
from consilium.wires.in_process import InProcess
from consilium.worker import Worker, open_worker, place_in


class Interrupted(Exception):
    """Stands for a crash."""


def run_in_process(study: Study, runs: Path, watch: Callable[[Any], None] | None = None) -> Result:
    folder = RunFolder.create(study, runs, watch)
    return Result(folder.path, engine.run(study, InProcess(study, folder.path), folder))


def crash_after(event: str, round: int) -> Callable[[Mapping[str, Any]], None]:
    """A watcher that ends the run at an event of a round."""

    def watch(seen: Mapping[str, Any]) -> None:
        if seen["event"] == event and seen.get("round") == round:
            raise Interrupted

    return watch


class Tampered(InProcess):
    """An in-process wire whose replies pass through a hand that may change or lose them."""

    def __init__(self, study: Study, folder: Path, hand: Callable[[str, Envelope, Reply], Reply]) -> None:
        super().__init__(study, folder)
        self.hand = hand

    def train(self, orders: Mapping[str, Packet], head: Envelope) -> Iterator[tuple[str, Reply]]:
        for name, reply in super().train(orders, head):
            yield name, self.hand(name, head, reply)


def run_tampered(study: Study, runs: Path, hand: Callable[[str, Envelope, Reply], Reply]) -> RunFolder:
    folder = RunFolder.create(study, runs)
    engine.run(study, Tampered(study, folder.path, hand), folder)
    return folder


def without_packet(reply: Reply) -> Reply:
    return replace(reply, packet=None, lost="the link broke")


def with_packet(reply: Reply, change: Callable[[Packet], Packet]) -> Reply:
    assert reply.packet is not None
    return replace(reply, packet=change(reply.packet))


def state(result: Result | RunFolder) -> bytes:
    """The bytes of the last server state."""
    path = result.folder if isinstance(result, Result) else result.path
    return (path / "last.safetensors").read_bytes()


def digest(item: Any) -> str:
    """A hash of everything a message holds."""
    shape, weights, tensors = tree.split(item)
    parts = [shape, *(w.digest for w in weights.values()), *(str(t.tolist()) for t in tensors.values())]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


class Stage:
    """A study opened by hand: its sites' workers and the server, one step at a time."""

    def __init__(self, study: Study, runs: Path) -> None:
        folder = RunFolder.create(study, runs)
        self.study, self.method, self.task = study, study.method, study.task
        self.wire = InProcess(study, folder.path)
        self.roster = self.wire.roll_call().members
        federation = study.federation()
        self.workers: dict[str, Worker] = {
            site: open_worker(study, federation, site, self.roster, place_in(folder.path, site)) for site in self.roster
        }
        self.rounds = [round for _, round in timeline(self.method, study.plan.rounds)]
        self.server = self.method.start(self.task, self.roster)

    def train(self, site: str, order: Packet, index: int, merged: int) -> Packet:
        """What leaves a site that was sent an order."""
        head = Envelope("run", self.study.method_name, self.rounds[index], {site: merged})
        packet = self.workers[site].train(order, head.request("train", site, "")).packet
        assert packet is not None
        return packet

    def round(self, index: int) -> None:
        replies = {}
        for site in self.workers:
            order = self.method.send(self.server, self.roster[site], self.rounds[index])
            packet = self.train(site, flatten(order), index, index - 1)
            replies[site] = unflatten(packet, self.method.Uplink)
        self.server = self.method.merge(self.server, replies, self.rounds[index])
