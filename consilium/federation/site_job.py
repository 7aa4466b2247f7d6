"""The hospital's process in a job: it passes the server's requests to the hospital's site service."""

from __future__ import annotations

import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from consilium import tree
from consilium.federation.hospital_site import ClosedSite, HospitalSite
from consilium.federation.order_door import Arrived, OrderDoor
from consilium.federation.parts import confirmed, cut
from consilium.federation.signed_releases import checker
from consilium.hospital import hospital_path, read_hospital
from consilium.left_lines import now
from consilium.site_service import write_error
from consilium.wires.flare import ANSWER, ORDER, patience

IDLE = 10.0  # seconds after which a site that has nothing to do says so: the server may have given it up


def open_hospital(settings: Path, kit: Path, name: str, study: Path) -> HospitalSite | ClosedSite:
    """This hospital in a job; `name` is that on its certificate.

    If it cannot be opened, its own log says why, and the server is told that much.
    """
    try:
        hospital = read_hospital(settings)
    except Exception:
        traceback.print_exc()  # in process.log of the kit: without settings there is no other place
        return ClosedSite(None)
    try:
        site = HospitalSite(hospital, name, study.read_text(encoding="utf-8"))
        site.service.check_release = checker(kit, name)
        return site
    except Exception:
        text = f"{now()} this site could not be opened\n{traceback.format_exc()}\n"
        write_error(text, Path(hospital.memory) / "errors.log", private=True)
        return ClosedSite(Path(hospital.memory))


class SiteJob(Executor):  # type: ignore[misc]
    """Answers the server for as long as the job lasts; NVIDIA FLARE's own tasks are not used, so nothing is polled.

    The parts of an order are confirmed at once; one thread carries it out. What comes twice is confirmed again and not
    repeated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._door = OrderDoor()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            engine = fl_ctx.get_engine()
            workspace = engine.get_workspace()
            study = Path(workspace.get_app_config_dir(fl_ctx.get_job_id())) / "study.toml"
            kit = Path(workspace.get_root_dir())
            site = open_hospital(hospital_path(), kit, fl_ctx.get_identity_name(), study)
            threading.Thread(target=self._work, args=(site, engine), daemon=True).start()
            engine.register_aux_message_handler(ORDER, self._take)

    def _take(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        return make_reply(ReturnCode.OK if self._door.take(request) else ReturnCode.BAD_REQUEST_DATA)

    def _work(self, site: HospitalSite | ClosedSite, engine: Any) -> None:
        torch.set_num_threads(1)
        self._door.set_room(site.room())
        while True:
            order = self._door.next(IDLE)
            if order is not None:
                self._carry_out(order, site, engine)
                del order  # its bytes need not wait for the next
                continue
            nothing = Shareable()
            nothing["order"] = ""
            with engine.new_context() as fl_ctx:
                engine.send_aux_request(["server"], ANSWER, nothing, 5.0, fl_ctx, optional=True)

    def _carry_out(self, order: Arrived, site: HospitalSite | ClosedSite, engine: Any) -> None:
        start = time.monotonic()
        asked = site.read(order.text) if isinstance(site, HospitalSite) and not order.refused else None
        if asked is not None and isinstance(site, HospitalSite):
            answer = site.answer(asked.request, order.body)
        else:
            answer = site.turn_away("order" if order.refused else "damaged", order.refused)
        end = time.monotonic() + max(10.0, (asked.seconds if asked else 0.0) - (time.monotonic() - start))
        for part in cut(order.name, answer.body, {"head": tree.to_text(answer.head)}):
            if not self._post(engine, part, end):
                break

    def _post(self, engine: Any, part: Shareable, end: float) -> bool:
        """Whether the server has confirmed a part of an answer; it is repeated until then."""
        while (left := end - time.monotonic()) > 0:
            with engine.new_context() as fl_ctx:
                if fl_ctx.get_run_abort_signal().triggered:
                    return False
                seconds = min(left, patience(len(part["body"])))
                replies = engine.send_aux_request(["server"], ANSWER, part, seconds, fl_ctx, optional=True)
                if confirmed(replies, "server"):
                    return True
            time.sleep(0.5)
        return False

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Any:
        return make_reply(ReturnCode.TASK_UNKNOWN)
