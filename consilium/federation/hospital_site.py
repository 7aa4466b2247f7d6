"""A hospital in a job: the site service under the rules of its hospital.toml, with orders that arrive as bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from consilium import packet_files, tree
from consilium.caps import largest_order
from consilium.differences import Version
from consilium.errors import StudyError
from consilium.files import make_folder, write_bytes
from consilium.hospital import Hospital
from consilium.hospital_policy import HospitalPolicy
from consilium.left_lines import log_failure, now
from consilium.machine import check_compiler, machine_memory, pick_device
from consilium.messages import AnswerHead, Request
from consilium.plan import Plan
from consilium.policy import Refused, read_key
from consilium.site_service import OpenedStudy, SiteService, write_error
from consilium.transport import packed, unpacked
from consilium.tree import Packet, PacketError
from consilium.wires import held
from consilium.wires.flare import ROOM, Body, FlareAnswer, OrderHead


class HospitalSite:
    """One hospital in one run."""

    def __init__(
        self,
        hospital: Hospital,
        kit: str,
        text: str,
        check_release: Callable[[Request, Packet], None] = lambda request, packet: None,
    ) -> None:
        """`kit` is the name on the certificate, `text` the study as it was submitted.

        `check_release` refuses a release that the server has not signed.
        """
        self.hospital, self.kit, self.text = hospital, kit, text
        memory = self._memory = Path(hospital.memory)
        key = read_key(memory / "key")
        self._plan = Plan()  # of the study, once it is read
        self._held: dict[str, dict[str, Tensor]] = {}  # by what was asked: the last packet's tensors, by content
        self._errors = memory / "errors.log"
        self.service = SiteService(
            hospital.site,
            open=self._open,
            place=hospital.place,
            policy=lambda study: HospitalPolicy(hospital.limits, hospital.labels, key, memory),
            errors=lambda: self._errors,
            log_failure=partial(log_failure, memory),
            check_release=check_release,
            hospital=True,
        )

    def read(self, text: object) -> OrderHead | None:
        """The site's door: what the server asks, or None if it is nothing that can be asked; its log says why."""
        try:
            if isinstance(text, str):
                return tree.from_text(text, OrderHead)
            why = "a request that is no text"
        except PacketError as error:
            why = str(error)
        write_error(f"{now()} a request was refused at the door: {why}\n", self._errors, private=True)
        return None

    def turn_away(self, word: str, why: str = "") -> FlareAnswer:
        """The answer to what is no request: one word of `REASONS`; `why` is for the site's own log."""
        if why:
            write_error(f"{now()} a request was refused at the door: {why}\n", self._errors, private=True)
        return FlareAnswer(log_failure(self._memory, None, AnswerHead(word)))

    def room(self) -> int:
        """Bytes of the largest order that is taken in: what the study can need, and at most half of the memory."""
        limits = self.hospital.limits
        if limits.order_bytes:
            return limits.order_bytes
        most = (limits.memory_bytes or machine_memory()) // 2
        try:
            return min(most, largest_order(limits, self.hospital.study(self.text)) + ROOM)
        except Exception:  # the roll call is answered with the reason, and comes without an order
            return ROOM

    def answer(self, request: Request, body: Body) -> FlareAnswer:
        """Do what is asked, or say in one word why not."""
        found = self.service.answer(request, lambda: self._order(request, body))
        try:
            return FlareAnswer(found.head, b"" if found.packet is None else self._bytes(found.packet, request))
        except Exception as error:
            return FlareAnswer(self.service.failed(error, request).head)

    def _bytes(self, packet: Packet, request: Request) -> bytes:
        """An answer as it travels; of an update, the server has the order at hand."""
        here = self._held[request.do] if request.do == "train" else {}
        versions = {path: Version(name, here[name]) for path, name in request.tensors.items() if name in here}
        return packet_files.to_bytes(packed(packet, self._plan.transport, self._plan.compress, versions))

    def _open(self) -> OpenedStudy:
        """The study and the hospital's own data, if the hospital takes part."""
        hospital = self.hospital
        study = hospital.study(self.text)
        self._plan = study.plan
        federation = hospital.federation(study.facts)
        if not self.kit == hospital.site == next(iter(federation.sites)):
            named = f"kit {self.kit}, hospital.toml {hospital.site}, site.toml {next(iter(federation.sites))}"
            raise Refused("name", f"the names differ: {named}")
        try:
            device = pick_device(hospital.device, 0)
            if study.local.compile:
                check_compiler(device)
        except StudyError as error:
            raise Refused("device", str(error)) from error
        return OpenedStudy(hospital.on_own_device(study), federation, study.hash)

    def _order(self, request: Request, body: Body) -> Packet:
        """What was sent, with what was left out because it is here; tensors stay in their files."""
        place = self.hospital.place(request.run)
        make_folder(place, private=True)
        path = place / "order.safetensors"
        write_bytes(body, path, private=True)
        here = {name: tensor for part in self._held.values() for name, tensor in part.items()}
        sent = packet_files.read(path)
        if self._plan.compress or self._plan.transport != "exact":
            sent = unpacked(
                sent, (self.hospital.limits.memory_bytes or machine_memory()) // 4, here
            )  # it is there up to four times
        packet = held.completed(sent, request.tensors, here)
        self._held[request.do] = {request.tensors[name]: tensor for name, tensor in packet.tensors.items()}
        return packet


@dataclass(frozen=True)
class ClosedSite:
    """A hospital whose settings or key cannot be used: it says that much, whatever it is asked."""

    memory: Path | None  # where its log is; None: its settings cannot be read, so nobody knows

    def room(self) -> int:
        return ROOM

    def turn_away(self, word: str, why: str = "") -> FlareAnswer:
        head = AnswerHead("opening")
        return FlareAnswer(head if self.memory is None else log_failure(self.memory, None, head))
