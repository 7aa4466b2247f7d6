"""A round of six sites on loopback with 30 MB and no training, against NVIDIA FLARE's own echo of the same bytes; and
1 GB of tensors there and back, with the server's memory meanwhile."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from benchmarks.measuring import Measured, load, peak_of_tree
from benchmarks.small import SITES, small_study, write_small
from consilium.federation.admin import AdminClient, open_admin
from consilium.federation.supervisor import prepare, start
from consilium.federation.trial import START, LocalFederation, settle, stopped_by_signals
from consilium.packet_files import to_bytes
from consilium.study import Study
from consilium.tree import flatten

COUNT = 6
TOPIC = "echo"
FOUND = "echo.json"


class EchoSite(Executor):  # type: ignore[misc]
    """Sends back what it gets."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            fl_ctx.get_engine().register_aux_message_handler(TOPIC, self._echo)

    def _echo(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        reply = make_reply(ReturnCode.OK)
        reply["body"] = request["body"]
        return reply

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Any:
        return make_reply(ReturnCode.TASK_UNKNOWN)


class EchoServer(Controller):  # type: ignore[misc]
    """Bytes of their own to every site at once, and back, `rounds` times."""

    def __init__(self, size: int, rounds: int) -> None:
        super().__init__()
        self.size, self.rounds = size, rounds

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        engine = fl_ctx.get_engine()
        names = [client.name for client in engine.get_clients()]
        while len(self._round(engine, names, b"up?", 5.0)) < len(names):
            time.sleep(0.5)
        body = secrets.token_bytes(self.size)
        seconds = []
        for _ in range(self.rounds):
            start = time.perf_counter()
            replies = self._round(engine, names, body, 300.0)
            seconds.append(time.perf_counter() - start)
            assert [len(reply["body"]) for reply in replies] == [self.size] * len(names)
        Path(engine.get_workspace().get_root_dir(), FOUND).write_text(json.dumps(seconds))

    def _round(self, engine: Any, names: list[str], body: bytes, wait: float) -> list[Shareable]:
        """A thread per site: the engine's own call for several messages at once (2.9.0) stops with a TypeError."""

        def ask(name: str) -> Shareable:
            request = Shareable()
            request["body"] = body
            with engine.new_context() as fl_ctx:
                return engine.send_aux_request([name], TOPIC, request, wait, fl_ctx)[name]

        with ThreadPoolExecutor(len(names)) as threads:
            return [reply for reply in threads.map(ask, names) if reply.get_return_code() == ReturnCode.OK]

    def start_controller(self, fl_ctx: FLContext) -> None:
        pass

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass


def deployed_rounds(folder: Path, repeats: int) -> list[Measured]:
    """Two jobs with the same kits: ours, then the echo on NVIDIA FLARE's own start."""
    data = write_small(folder / "small")
    study = small_study(data, "benchmarks.nothing:Drift", COUNT, rounds=1 + repeats)
    size = len(to_bytes(flatten(study.method.send(_server(study), None, None))))
    local = settle(study, SITES[:COUNT], folder / "federation")
    with _processes(local, "benchmarks.nothing:Drift") as admin:
        _submit_study(admin, study)
    with _processes(local) as admin:
        _submit_echo(admin, folder, size, repeats)
    ours = median(_rounds(local)[1:])
    theirs = median(json.loads((local.kits["server"] / FOUND).read_text()))
    what = f"a deployed round of {COUNT} sites that train nothing, 30 MB of weights"
    return [Measured("federation", what, ours, "plain echo", theirs, "s", ours / theirs, 1.5, facts={"load": load()})]


def _server(study: Any) -> Any:
    from consilium.site import SiteCard

    roster = {name: SiteCard(name, i, 1, study.facts.labels) for i, name in enumerate(SITES[:COUNT])}
    return study.method.start(study.task, roster)


def large_messages(folder: Path, repeats: int) -> list[Measured]:
    """1 GB to one site and back, twice: the first round starts from a state in memory, the second from files."""
    data = write_small(folder / "small")
    study = small_study(data, "benchmarks.nothing:Bulk", 1, rounds=2, widths=(4, 8))
    size = study.method.megabytes * (1 << 20)
    local = settle(study, SITES[:1], folder / "large")
    with (
        _processes(local, "benchmarks.nothing:Bulk") as admin,
        peak_of_tree(local.processes["server"].pid) as peak,
    ):
        _submit_study(admin, study)
    seconds = _rounds(local)[-1]
    what = "the server's memory while 1 GB goes to a site and back"
    facts = {"seconds for a round": seconds, "load": load()}
    took = peak()
    return [
        Measured("federation", what, took / 1e6, "what it must hold", size / 1e6, "MB", took / size, 3.0, facts=facts)
    ]


@contextmanager
def _processes(local: LocalFederation, method: str = "") -> Iterator[AdminClient]:
    """Server and sites until the block ends: ours, all of which allow `method`, or else NVIDIA FLARE's own."""
    with stopped_by_signals(), ExitStack() as stack:
        stack.callback(local.end)
        for name, kit in local.kits.items():
            if name == "admin":
                continue
            kind = "server" if name == "server" else "site"
            hospital = None if kind == "server" else local.hospital(name)
            if hospital and method:
                with hospital.open("a") as file:
                    file.write(f'[limits]\ncode = ["{method}"]\n')
            arguments, variables = prepare(kit, kind, hospital, [method])
            if not method:
                _reopen(kit)
                flare = "server" if kind == "server" else "client"
                arguments[3:5] = [f"nvflare.private.fed.app.{flare}.{flare}_train"]
            local.processes[name] = start(kit, arguments, variables)
        admin = stack.enter_context(open_admin(local.kits["admin"], START))
        admin.wait_for(admin.sites, START)
        yield admin


def _reopen(kit: Path) -> None:
    """NVIDIA FLARE's own way to start jobs and to reach them, and the echo's classes: our start takes studies only."""
    path = kit / "local" / "resources.json"
    settings = json.loads(path.read_text())
    default = json.loads(path.with_name("resources.json.default").read_text())
    (launcher,) = (part for part in default["components"] if part["id"] == "process_launcher")
    others = [part for part in settings["components"] if part["id"] != "process_launcher"]
    settings |= {"components": [*others, launcher], "class_allow_list": ["benchmarks.federation"]}
    del settings["app_validator"]
    path.write_text(json.dumps(settings))
    path = kit / "local" / "comm_config.json"
    internal = {"scheme": "tcp", "resources": {"host": "localhost", "connection_security": "clear"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "internal": internal}))


def _submit_study(admin: AdminClient, study: Study) -> None:
    job = admin.submit(study)
    admin.wait(job, 1800.0)
    outcome = admin.outcome(job)
    if outcome["state"] != "finished":
        raise RuntimeError(outcome["said"])


def _rounds(local: LocalFederation) -> list[float]:
    """Seconds from one round's end to the next."""
    (journal,) = local.runs.glob("*/journal.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    ends = [datetime.fromisoformat(event["time"]) for event in events if event["event"] == "round"]
    return [(after - before).total_seconds() for before, after in itertools.pairwise(ends)]


def _submit_echo(admin: AdminClient, folder: Path, size: int, rounds: int) -> None:
    config = folder / "echo" / "app" / "config"
    config.mkdir(parents=True, exist_ok=True)
    server = {"id": "run", "path": "benchmarks.federation.EchoServer", "args": {"size": size, "rounds": rounds}}
    site = {"tasks": ["*"], "executor": {"path": "benchmarks.federation.EchoSite", "args": {}}}
    meta = {"name": "echo", "resource_spec": {}, "min_clients": COUNT, "deploy_map": {"app": ["@ALL"]}}
    (config.parent.parent / "meta.json").write_text(json.dumps(meta))
    (config / "config_fed_server.json").write_text(json.dumps({"format_version": 2, "workflows": [server]}))
    (config / "config_fed_client.json").write_text(json.dumps({"format_version": 2, "executors": [site]}))
    admin.wait(admin.session.submit_job(str(config.parent.parent)), 1800.0)
