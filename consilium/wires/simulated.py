"""What the in-process and the worker-process wire share: packets pass as files, sites are asked through requests."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from consilium import packet_files, tree
from consilium.errors import DataError, RunError, StudyError, WireError
from consilium.messages import POLICY, REASONS, Envelope, Request
from consilium.site import POOLED, Roster, SiteCard, pooled_card
from consilium.study import Study
from consilium.transport import size_of
from consilium.tree import Packet
from consilium.validation import check_annotation, members_of
from consilium.weights import SiteName
from consilium.wires import held
from consilium.wires.local_sites import LocalAnswer, LocalRequest
from consilium.wires.site_wire import Returned, SiteWire

_numbers = itertools.count()  # of orders and exchanges: no two in this process have the same name


class SimulatedWire(SiteWire):
    """A federation on one machine, with its sites' data in one folder."""

    def __init__(self, study: Study, folder: Path) -> None:
        super().__init__(study)
        self.folder = folder
        self.spool = folder / "spool"
        self._spooled: set[Path] = set()  # orders and replies of the last exchange
        self._number = next(_numbers)  # of the exchange
        self._sent: dict[SiteName, int] = {}  # bytes of the last packet, as it would travel
        self._answers: dict[SiteName, LocalAnswer] = {}  # the latest, for what only this machine is told

    @abstractmethod
    def ask(self, requests: Mapping[SiteName, LocalRequest]) -> Iterator[tuple[SiteName, LocalAnswer]]:
        """Every site's answer, as they come; slow sites first in `requests`, which may be under way on return."""

    # ------------------------------------------------------------------------------------ roll call

    def names(self) -> tuple[list[SiteName], list[SiteName]]:
        federation = self.study.federation()
        members = members_of(self.study, federation)
        check_annotation(self.study, federation, members)
        return members, sorted(self.study.plan.leave_out)

    def call(self, names: Sequence[SiteName]) -> Iterator[tuple[SiteName, Returned]]:
        """Open every site: its cache is made now."""
        shutil.rmtree(self.spool, ignore_errors=True)  # of a run that was killed
        self.spool.mkdir(parents=True, exist_ok=True)
        request = Request("card", self.folder.name)
        return self._returned(self.ask({name: self._local(name, request) for name in names}))

    def check_cards(self, answers: Mapping[SiteName, Returned]) -> dict[SiteName, str]:
        for name, answer in answers.items():
            local = self._answers[name]
            if answer.head.error and not (local.mistake or answer.head.error in POLICY):
                raise WireError(f"site '{name}' could not be opened: {_reason(local)}.")
        faults = [local.why for local in self._answers.values() if local.mistake]
        if faults:
            raise DataError("\n".join(faults))
        told = [f"site '{name}': {why}." for name, answer in answers.items() if (why := self.unusable(answer))]
        if told:
            raise StudyError("\n".join(told))
        return {name: self.mismatch(answer) for name, answer in answers.items() if answer.head.error}

    def no_cases(self, sites: Sequence[SiteName]) -> str:
        return (
            f"no training cases at {', '.join(sites)}: draw splits with `consilium check "
            f"{self.study.data.federation} --split 0.5,0.25,0.25`, or leave the site out with study.leave_out."
        )

    def as_roster(self, cards: Mapping[SiteName, SiteCard]) -> Roster:
        if not self.study.pooled:
            return cards
        name = self._pooled_name()
        return {name: pooled_card(cards.values(), self.study.facts.labels, name)}

    def _pooled_name(self) -> SiteName:
        """A run that version 0.1 began goes on under the name it had there."""
        before = POOLED.strip("()")
        return before if (self.folder / "sites" / before / "memory").is_dir() else POOLED

    # ------------------------------------------------------------------------------------ requests

    def exchange(
        self, do: str, packets: Mapping[SiteName, Packet], head: Envelope
    ) -> Iterator[tuple[SiteName, Returned]]:
        for path in self._spooled:
            path.unlink(missing_ok=True)  # what is mapped stays
        packets, headers = held.shared(packets)
        if self.study.plan.transport != "exact":
            sizes = {id(packet): size_of(packet, self.study.plan.transport) for packet in packets.values()}
            self._sent = {name: sizes[id(packet)] for name, packet in packets.items()}
        written: dict[int, Path] = {}  # sites that are sent the same packet read the same file
        for name, packet in packets.items():
            if id(packet) not in written:
                written[id(packet)] = self.spool / f"{name}.{next(_numbers)}.order"
                packet_files.write(packet, written[id(packet)])
        self._spooled, self._number = set(written.values()), next(_numbers)
        # the largest sites first, so that the last process to finish is not alone for long
        names = sorted(packets, key=lambda name: (-self.roster[name].n if name in self.roster else 0, name))
        requests = {
            name: self._local(
                name,
                replace(head.request(do, name, self.members), header=headers.get(name, "")),
                written[id(packets[name])],
            )
            for name in names
        }
        return self._returned(self.ask(requests))

    def _local(self, site: SiteName, request: Request, order: Path | None = None) -> LocalRequest:
        replies = self.spool / f"{self._number}.replies"
        return LocalRequest(str(self.folder), site, request, str(order or ""), str(replies))

    def _returned(self, answers: Iterator[tuple[SiteName, LocalAnswer]]) -> Iterator[tuple[SiteName, Returned]]:
        return ((name, self._read(name, answer)) for name, answer in answers)

    def _read(self, site: SiteName, answer: LocalAnswer) -> Returned:
        self._answers[site] = answer
        if answer.head.error:
            rule = answer.head.error in POLICY  # then a simulation says what a federation would
            return Returned(answer.head, why=REASONS[answer.head.error] if rule else _reason(answer))
        if not answer.reply:
            return Returned(answer.head)
        path = Path(answer.reply)
        self._spooled.add(path)
        try:
            packet = packet_files.read(path, packet_files.Place(answer.start, answer.size))
        except tree.PacketError as error:
            return Returned(answer.head, why=str(error))
        lossy = self.study.plan.transport != "exact"
        came = size_of(packet, self.study.plan.transport) if lossy else None
        return Returned(answer.head, packet, sent=self._sent.get(site) if lossy else None, came=came)

    def lost(self, do: str, site: SiteName, answer: Returned) -> None:
        local = self._answers[site]
        if local.full:  # all sites of a simulation share this disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        if answer.head.error in (*POLICY, "memory"):  # a memory may be made again: the engine says what follows
            return
        if do == "train":
            if local.mistake:
                raise RunError(local.why)
            return
        what = "scoring failed at site" if do == "score" else "a release could not be stored at site"
        raise WireError(f"{what} '{site}': {answer.why.removesuffix('.')}.")

    def close(self) -> None:
        shutil.rmtree(self.spool, ignore_errors=True)


def _reason(answer: LocalAnswer) -> str:
    """Why a site failed, and where its traceback is."""
    said = answer.why.removesuffix(".")
    return f"{said} (details in {answer.log})" if answer.log else said
