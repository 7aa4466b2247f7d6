"""What the in-process and the worker-process wire share: packets pass as files, sites are asked through requests."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from consilium import tree
from consilium.engine import WireError
from consilium.envelope import Envelope, Reply, RollCall, card_from_json, card_to_json
from consilium.errors import DataError, RunError
from consilium.files import write_json
from consilium.scores import Row, read_rows
from consilium.site import Roster, SiteCard
from consilium.study import Study
from consilium.tree import Packet
from consilium.weights import SiteName
from consilium.worker import POOLED, check_annotation, members_of

Request = Mapping[str, Any]
Answer = Mapping[str, Any]

_numbers = itertools.count()  # of orders: no two in this process have the same name


class SimulatedWire(ABC):
    """A federation on one machine, with its sites' data in one folder."""

    def __init__(self, study: Study, folder: Path) -> None:
        self.study, self.folder = study, folder
        self.spool = folder / "spool"
        self.roster: Roster = {}
        self._orders: list[Path] = []

    @abstractmethod
    def ask(self, requests: Mapping[SiteName, Request]) -> Iterator[tuple[SiteName, Answer]]:
        """Every site's answer, as they come; slow sites first in `requests`, which may be under way on return."""

    def roll_call(self) -> RollCall:
        """Open every site (its cache is made now) and fix the roster."""
        federation = self.study.federation()
        members = members_of(self.study, federation)
        check_annotation(self.study, federation, members)
        guests = sorted(self.study.plan.leave_out)
        answers = dict(self.ask({name: self._request("card", name) for name in (*members, *guests)}))
        for name, answer in answers.items():
            if "error" in answer and not answer.get("mistake"):
                raise WireError(f"site '{name}' could not be opened: {_reason(answer)}.")
        faults = [str(answer["error"]) for answer in answers.values() if "error" in answer]
        if faults:
            raise DataError("\n".join(faults))
        n = {name: answers[name]["n"] for name in members}
        if not all(n.values()):
            empty = [name for name in members if not n[name]]
            raise DataError(
                f"no training cases at {', '.join(empty)}: draw splits with `consilium check {federation.folder} "
                f"--split 0.5,0.25,0.25`, or leave the site out with study.leave_out."
            )
        if self.study.pooled:
            bare = sum(answers[name].get("unlabelled", 0) for name in members)
            cards = [SiteCard(POOLED, 0, sum(n.values()), federation.labels, bare)]
        else:
            cards = [card_from_json({**answers[m], "index": i}) for i, m in enumerate(members)]
        self.roster = {card.name: card for card in cards}
        shutil.rmtree(self.spool, ignore_errors=True)  # of a run that was killed
        self.spool.mkdir(parents=True, exist_ok=True)
        write_json({name: card_to_json(card) for name, card in self.roster.items()}, self._roster, durable=False)
        audience = {name: name in guests for name in sorted((*members, *guests))}
        measured = ("seconds", "memory_mb")
        facts = {name: {k: v for k, v in answers[name].items() if k not in measured} for name in (*members, *guests)}
        return RollCall(self.roster, audience, facts)

    def train(self, orders: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]:
        answers = self._exchange("train", orders, head)
        return ((name, self._reply(name, answer)) for name, answer in answers)

    def _reply(self, site: SiteName, answer: Answer) -> Reply:
        if answer.get("full"):  # all sites of a simulation share this disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        if answer.get("mistake"):
            raise RunError(str(answer["error"]))
        if "error" in answer:
            return Reply(None, answer["seconds"], _reason(answer), answer["memory_mb"])
        path = self._reply_path(site)
        try:
            packet = tree.read(path)
        except tree.PacketError as error:
            return Reply(None, answer["seconds"], str(error), answer["memory_mb"])
        path.unlink()  # what is mapped stays; file systems are slow to replace a file, and quick to make a new one
        return Reply(packet, answer["seconds"], "", answer["memory_mb"])

    def score(self, releases: Mapping[SiteName, Packet], head: Envelope) -> Mapping[SiteName, list[Row]]:
        answers = dict(self._exchange("score", releases, head))
        for name, answer in answers.items():
            if "error" in answer:
                raise WireError(f"scoring failed at site '{name}': {_reason(answer)}.")
        return {name: read_rows(self._reply_path(name)) for name in answers}

    def deliver(self, releases: Mapping[SiteName, Packet], head: Envelope) -> None:
        for name, answer in self._exchange("deliver", releases, head):
            if "error" in answer:
                raise WireError(f"site '{name}' could not store its release: {_reason(answer)}.")

    def _exchange(
        self, do: str, packets: Mapping[SiteName, Packet], head: Envelope
    ) -> Iterator[tuple[SiteName, Answer]]:
        for path in self._orders:
            path.unlink(missing_ok=True)
        written: dict[int, Path] = {}  # sites that are sent the same packet read the same file
        for name, packet in packets.items():
            if id(packet) not in written:
                written[id(packet)] = self.spool / f"{name}.{next(_numbers)}.order"
                tree.write(packet, written[id(packet)])
        self._orders = list(written.values())
        # the largest sites first, so that the last process to finish is not alone for long
        names = sorted(packets, key=lambda name: (-self.roster[name].n if name in self.roster else 0, name))
        return self.ask({name: self._request(do, name, head, written[id(packets[name])]) for name in names})

    def _request(
        self, do: str, site: SiteName, head: Envelope | None = None, order: Path | None = None
    ) -> dict[str, Any]:
        return {
            "do": do,
            "run": str(self.folder),
            "site": site,
            "roster": str(self._roster),
            "head": head.for_site(site).to_json() if head else None,
            "order": str(order),
            "reply": str(self._reply_path(site)),
        }

    @property
    def _roster(self) -> Path:
        """Read once by every process that opens a site."""
        return self.spool / "roster.json"

    def _reply_path(self, site: SiteName) -> Path:
        return self.spool / f"{site}.reply"

    def close(self) -> None:
        shutil.rmtree(self.spool, ignore_errors=True)


def _reason(answer: Answer) -> str:
    """Why a site failed, and where its traceback is."""
    said = str(answer["error"]).removesuffix(".")
    return f"{said} (details in {answer['log']})" if answer.get("log") else said
