"""The server's process in a job: the engine runs here, with the sites at the other end of the line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.utils.reliable_message import ReliableMessage

from consilium import engine
from consilium.errors import UserError, WorkError
from consilium.federation.places import again_mark, outcome_path, returned_folder, runs_of
from consilium.run_folder import RunFolder
from consilium.store import write_json
from consilium.study import load_study
from consilium.weights import SiteName
from consilium.wires.flare import REASONS, TOPIC, Answer, FlareWire, GoOn

PIECE = 300.0  # seconds one message may take to arrive before it is sent again


class _Line:
    """The sites of this job, through NVIDIA FLARE's reliable messages: a short break of the network loses nothing."""

    def __init__(self, fl_ctx: FLContext, kit: Path, abort: Signal) -> None:
        self._engine = fl_ctx.get_engine()
        self._abort = abort
        self._returned = returned_folder(kit, fl_ctx.get_job_id())

    def ask(self, site: SiteName, request: Mapping[str, Any], body: bytes, seconds: float) -> Answer:
        message = Shareable()
        message["request"] = json.dumps(request)
        message["body"] = body
        with self._engine.new_context() as fl_ctx:
            piece = min(PIECE, seconds / 2)
            reply = ReliableMessage.send_request(site, TOPIC, message, piece, seconds, self._abort, fl_ctx)
        if reply.get_return_code() != ReturnCode.OK:
            return Answer({}, error="late")
        try:
            facts, body, error = json.loads(reply["facts"]), reply["body"], reply["error"]
            if isinstance(facts, dict) and isinstance(body, bytes) and (error == "" or error in REASONS):
                return Answer(facts, body, error)
        except (KeyError, TypeError, ValueError):
            pass
        return Answer({}, error="damaged")

    def here(self) -> set[SiteName]:
        return {client.name for client in self._engine.get_clients()}

    def back(self) -> set[SiteName]:
        return {path.name for path in self._returned.glob("*")}

    def stopped(self) -> bool:
        return bool(self._abort.triggered)


class ServerJob(Controller):  # type: ignore[misc]
    """One study, from wherever its run folder stands."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        torch.set_num_threads(1)
        workspace = fl_ctx.get_engine().get_workspace()
        job = fl_ctx.get_job_id()
        kit = Path(workspace.get_root_dir())
        study = load_study(Path(workspace.get_app_config_dir(job)) / "study.toml")
        folder = RunFolder.create(study, runs_of(kit))
        outcome: dict[str, Any] = {"job": job, "run": folder.path.name, "state": "running", "said": ""}
        write_json(outcome, outcome_path(kit, job))
        try:
            if not folder.finished:
                engine.run(study, FlareWire(study, folder, _Line(fl_ctx, kit, abort_signal)), folder)
            outcome |= {"state": "finished"}
        except GoOn as back:
            folder.note("going on", said=f"{back} came back; the run goes on as a new job")
            again_mark(kit, job).touch()
            outcome |= {"state": "going on", "said": f"{back} came back"}
        except (UserError, WorkError) as error:
            outcome |= {"state": "stopped", "said": str(error)}
            self.system_panic(str(error), fl_ctx)
        finally:
            if outcome["state"] == "running":
                outcome |= {"state": "failed", "said": "the server's own log says why"}
            write_json(outcome, outcome_path(kit, job))

    def start_controller(self, fl_ctx: FLContext) -> None:
        pass

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass

    def process_result_of_unknown_task(self, *_: Any, **__: Any) -> ClientTask | None:
        return None
