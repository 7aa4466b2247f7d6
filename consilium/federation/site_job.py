"""The hospital's process in a job: it opens the desk and passes the server's requests to it."""

from __future__ import annotations

import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.utils.reliable_message import ReliableMessage

from consilium.federation.desk import Desk
from consilium.federation.hospital import hospital_path, read_hospital
from consilium.wires.flare import ANSWER, ORDER, patience


class SiteJob(Executor):  # type: ignore[misc]
    """Answers the server for as long as the job lasts; NVIDIA FLARE's own tasks are not used, so nothing is polled.

    An order is confirmed at once and carried out by one thread; a repeated order is confirmed again and not repeated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._orders: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
        self._taken: set[str] = set()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            engine = fl_ctx.get_engine()
            study = Path(engine.get_workspace().get_app_config_dir(fl_ctx.get_job_id())) / "study.toml"
            desk = Desk(read_hospital(hospital_path()), fl_ctx.get_identity_name(), study.read_text(encoding="utf-8"))
            threading.Thread(target=self._work, args=(desk, engine), daemon=True).start()
            engine.register_aux_message_handler(ORDER, self._take)

    def _take(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        order = json.loads(request["request"])
        if order and order["order"] not in self._taken:
            self._taken.add(order["order"])
            self._orders.put((order, request["body"]))
        return make_reply(ReturnCode.OK)

    def _work(self, desk: Desk, engine: Any) -> None:
        torch.set_num_threads(1)
        while True:
            order, body = self._orders.get()
            start = time.monotonic()
            answer = desk.answer(order, body)
            message = Shareable()
            message["order"] = order["order"]
            message["facts"] = json.dumps(answer.facts)
            message["body"] = answer.body
            message["error"] = answer.error
            left = max(10.0, order["seconds"] - (time.monotonic() - start))
            with engine.new_context() as fl_ctx:
                stop = fl_ctx.get_run_abort_signal()
                ReliableMessage.send_request(
                    "server", ANSWER, message, min(left / 2, patience(answer.body)), left, stop, fl_ctx
                )

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Any:
        return make_reply(ReturnCode.TASK_UNKNOWN)
