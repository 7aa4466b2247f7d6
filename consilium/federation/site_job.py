"""The hospital's process in a job: it opens the desk and passes the server's requests to it."""

from __future__ import annotations

import json
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
from consilium.wires.flare import TOPIC


class SiteJob(Executor):  # type: ignore[misc]
    """Answers the server for as long as the job lasts; NVIDIA FLARE's own tasks are not used, so it need not poll."""

    def __init__(self) -> None:
        super().__init__()
        self._desk: Desk | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            torch.set_num_threads(1)
            workspace = fl_ctx.get_engine().get_workspace()
            study = Path(workspace.get_app_config_dir(fl_ctx.get_job_id())) / "study.toml"
            hospital = read_hospital(hospital_path())
            self._desk = Desk(hospital, fl_ctx.get_identity_name(), study.read_text(encoding="utf-8"))
            ReliableMessage.register_request_handler(TOPIC, self._answer, fl_ctx)

    def _answer(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        assert self._desk is not None
        answer = self._desk.answer(json.loads(request["request"]), request["body"])
        reply = make_reply(ReturnCode.OK)
        reply["facts"] = json.dumps(answer.facts)
        reply["body"] = answer.body
        reply["error"] = answer.error
        return reply

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Any:
        return make_reply(ReturnCode.TASK_UNKNOWN)
