"""The server's process in a job: the engine runs here, with the sites at the other end of the line."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from consilium import engine, tree
from consilium.errors import RunError, UserError, WorkError
from consilium.extensions import code_hashes
from consilium.federation.job_files import STUDY
from consilium.federation.named_code import allowed_code, read_submitted
from consilium.federation.parts import confirmed, cut, follows, is_part
from consilium.federation.places import again_mark, outcome_path, returned_folder, runs_of
from consilium.federation.returning import AGAIN, read_outcome
from consilium.federation.signed_releases import signer
from consilium.files import make_folder, write_json
from consilium.messages import Request
from consilium.run_files.origin import differences
from consilium.run_folder import RunFolder
from consilium.scores.summary import missed_phases, passed_over
from consilium.study import Study
from consilium.weights import SiteName
from consilium.wires.flare import (
    ANSWER,
    ORDER,
    ROLL_CALL,
    Body,
    FlareAnswer,
    FlareWire,
    JobLink,
    OrderHead,
    RestartJob,
    mapped,
    patience,
    read_answer,
)
from consilium.wording import command

KNOCK = 2.0  # seconds before a site is asked again whether its process is up
BEAT = 5.0  # seconds between two questions whether a site that works is still there


@dataclass
class _Order:
    """What the server waits for; the answer's body grows in a file."""

    site: SiteName
    room: int
    path: Path
    done: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)  # a part may come twice at the same time
    answer: FlareAnswer = field(default_factory=lambda: FlareAnswer.of("late"))
    failure: OSError | None = None


class _FlareLink:
    """The sites of this job.

    Every part of an order is sent until the site confirms it; the answer comes as messages of their own, which the site
    repeats until they are confirmed. So a break of the network shorter than the deadline loses nothing.
    """

    def __init__(self, fl_ctx: FLContext, kit: Path, abort: Signal, spool: Path, silence: float) -> None:
        """`silence`: seconds without a sign of life after which a site counts as gone."""
        self._engine = fl_ctx.get_engine()
        self._abort, self._spool, self._silence = abort, spool, silence
        self._returned = returned_folder(kit, fl_ctx.get_job_id())
        self._orders: dict[str, _Order] = {}
        self._answered: deque[str] = deque(maxlen=1024)  # whose confirmation may have been lost
        self._up: set[SiteName] = set()
        self._silent: set[SiteName] = set()  # did not answer the last time
        self._dropped: list[tuple[SiteName, str]] = []
        self._heard: set[SiteName] = set()
        self._engine.register_aux_message_handler(ANSWER, self._receive)

    def ask(self, site: SiteName, request: Request, body: Body, seconds: float, room: int) -> FlareAnswer:
        if site in self._silent and not self._send(site, Shareable(), KNOCK):
            return FlareAnswer.of("away")  # it was waited for once; its return is noticed elsewhere
        end = time.monotonic() + seconds
        name = secrets.token_hex(16)
        self._spool.mkdir(parents=True, exist_ok=True)
        order = self._orders[name] = _Order(site, room, self._spool / name)
        try:
            parts = cut(name, body, {"request": tree.to_text(OrderHead(name, seconds, request))})
            # at roll call its process is only just starting
            silence = max(self._silence, ROLL_CALL) if request.do == "card" else self._silence
            if all(self._hand_over(order, part, end, silence) for part in parts):
                self._wait(order, end, silence)
            (self._silent.discard if order.done.is_set() else self._silent.add)(site)
            if order.failure:
                raise order.failure
            return order.answer
        finally:
            del self._orders[name]
            order.path.unlink(missing_ok=True)

    def _wait(self, order: _Order, end: float, silence: float) -> None:
        """Until the answer is there; a site that is at work still says that it is there."""
        alive = asked = time.monotonic()
        while not order.done.wait(0.2) and not self._over(order, end):
            now = time.monotonic()
            if now - asked >= min(BEAT, silence / 3):
                asked = now
                if self._send(order.site, Shareable(), KNOCK):
                    alive = now
            if now - alive > silence:
                order.answer = FlareAnswer.of("silent")
                return

    def _over(self, order: _Order, end: float) -> bool:
        return time.monotonic() > end or self._abort.triggered or order.given_up.is_set()

    def _hand_over(self, order: _Order, part: Shareable, end: float, silence: float) -> bool:
        """Whether the site has confirmed a part of an order."""
        site, since = order.site, time.monotonic()
        while (left := end - time.monotonic()) > 0 and not self._over(order, end):
            if order.done.is_set():  # the site has answered before it has everything: it takes no more
                return False
            if time.monotonic() - since > silence + patience(len(part["body"])):
                order.answer = FlareAnswer.of("silent")
                return False
            if site not in self._up:
                if self._send(site, Shareable(), KNOCK):
                    self._up.add(site)
                else:
                    time.sleep(0.2)  # an unknown site is answered at once
            elif self._send(site, part, min(left, patience(len(part["body"])))):
                return True
            else:
                self._up.discard(site)
        return False

    def _send(self, site: SiteName, message: Shareable, seconds: float) -> bool:
        with self._engine.new_context() as fl_ctx:
            replies = self._engine.send_aux_request([site], ORDER, message, seconds, fl_ctx, optional=True)
        return confirmed(replies, site)

    def _receive(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        sender = str(fl_ctx.get_peer_context().get_identity_name())
        name = str(request.get("order"))
        order = self._orders.get(name)
        if not name:
            self._heard.add(sender)  # it has nothing to do
        elif name in self._answered:
            pass  # its confirmation was lost
        elif order is None or order.site != sender:
            self._dropped.append((sender, "an answer nobody waits for any more"))
            self._heard.add(sender)
        else:
            with order.lock:
                held = name in self._answered or self._take(name, order, request)
            return make_reply(ReturnCode.OK if held else ReturnCode.BAD_REQUEST_DATA)
        return make_reply(ReturnCode.OK)

    def _take(self, name: str, order: _Order, message: Shareable) -> bool:
        """Whether a part of an answer is held; parts come in order, and the file grows with them."""
        if not is_part(message, order.room):
            order.answer = FlareAnswer.of("size" if is_part(message, sys.maxsize) else "damaged")
        else:
            try:
                with order.path.open("ab") as file:
                    following = follows(message, file.tell())
                    if following is False:
                        return False
                    if following:
                        file.write(message["body"])
            except OSError as error:
                order.failure = error
            else:
                if "head" not in message:  # there is more to come
                    return True
                body = mapped(order.path)
                whole = len(body) == message["of"]
                order.answer = read_answer(message["head"], body) if whole else FlareAnswer.of("damaged")
        self._answered.append(name)
        order.done.set()
        return True

    def give_up(self, site: SiteName) -> None:
        for order in list(self._orders.values()):
            if order.site == site:
                order.given_up.set()

    def heard(self) -> set[SiteName]:
        found, self._heard = self._heard, set()
        return found

    def here(self) -> set[SiteName]:
        return {client.name for client in self._engine.get_clients()}

    def back(self) -> set[SiteName]:
        return {path.name for path in self._returned.glob("*")}

    def dropped(self) -> list[tuple[SiteName, str]]:
        found, self._dropped = self._dropped, []
        return found

    def stopped(self) -> bool:
        return bool(self._abort.triggered)


def _journal(topic: str, asked: Mapping[str, Any], fl_ctx: FLContext, folder: RunFolder) -> dict[str, Any]:
    """For the administrator: the journal's events from number `after` on."""
    events = folder.events()
    return {"run": folder.path.name, "events": events[int((asked or {}).get("after", 0)) :]}


def lacking(folder: RunFolder, job: str) -> str:
    """What a finished run lacks, in sentences; empty if nothing."""
    summary = folder.summary()
    out = summary.get("left_out", {})
    said = [f"site '{site}' was left out: {why}." for site, why in sorted(out.items())]
    if why := passed_over(folder.events(), summary["best"]["round"]):
        said.append(why)
    if why := missed_phases(folder.events()):
        said.append(why)
    if sites := [name for name in folder.lacking if name not in out]:
        said.append(
            f"the run ended without the last scores of {', '.join(sites)}, or without delivering the model there; when "
            f"they are connected, `consilium federation resume {job}` asks them again."
        )
    return " ".join(said)


def choose_run(study: Study, runs: Path, before: str, again: bool) -> Path:
    """The folder of a job's run: that of the job it follows, else the study's last, else a new one.

    Args:
        study: as it was submitted.
        runs: where the server's runs are.
        before: the run of the job that this one follows; empty if it follows none.
        again: make a new run, though there is one.
    """
    if before:
        return runs / before
    made = RunFolder.attempts(study, runs)
    begun = [path for path in made if RunFolder(path, study).begun]
    if again and begun == made:
        return RunFolder.path_of(study, runs, len(made) + 1)
    return made[-1] if made else RunFolder.path_of(study, runs)


def check_finished(study: Study, folder: RunFolder, line: JobLink) -> str:
    """What to say of a finished study that was submitted once more; an error if data or plug-ins are others now."""
    wire = FlareWire(study, folder, line)
    try:
        roll = wire.roll_call()
    finally:
        wire.close()
    again = "`consilium federation submit STUDY.toml --again`"
    now = {"sites": wire.before()["sites"], "plugins": code_hashes(study.plugins)}
    changed = [f"site '{site}': {why}" for site, why in sorted(roll.left_out.items())]
    changed += differences(folder.path, now)  # of the sites, the roll call has said it
    if changed:
        raise RunError(
            f"the run {folder.path.name} of this study is finished and was made from something else: "
            f"{'; '.join(changed)}. Train it again with {again}, or restore what changed."
        )
    return f"this study was finished already, as {folder.path.name}, and was not trained again; {again} does that."


def _wait_for(folder: RunFolder, seconds: float = 60.0) -> None:
    """The process of a job whose server died may live on for a while; it commits nothing once its sites have gone."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(RunError), folder.locked():
            return
        time.sleep(1.0)


def _hand_out(folder: RunFolder, to: Path, outcome: Mapping[str, Any]) -> None:
    """Put the run where NVIDIA FLARE looks for a job's results; files are linked, not copied."""
    to.mkdir(parents=True, exist_ok=True)
    write_json(outcome, to / "outcome.json")
    if folder.path.exists():
        leave = shutil.ignore_patterns("spool", ".lock", "store", "server")
        try:
            shutil.copytree(folder.path, to / folder.path.name, ignore=leave, copy_function=os.link)
        except OSError:
            shutil.rmtree(to / folder.path.name, ignore_errors=True)  # a full disk: the run folder itself is whole


class ServerJob(Controller):  # type: ignore[misc]
    """One study, from wherever its run folder stands."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        torch.set_num_threads(1)
        workspace = fl_ctx.get_engine().get_workspace()
        job = fl_ctx.get_job_id()
        kit = Path(workspace.get_root_dir())
        try:
            study = read_submitted(Path(workspace.get_app_config_dir(job)) / STUDY, allowed_code())
        except UserError as error:
            refused = {"job": job, "run": "", "state": "stopped", "said": str(error)}
            write_json(refused, outcome_path(kit, job))
            results = Path(workspace.get_run_dir(job)) / "results"
            make_folder(results)
            write_json(refused, results / "outcome.json")
            self.system_panic(str(error), fl_ctx)
            return
        meta = fl_ctx.get_prop(FLContextKey.JOB_META) or {}
        follows = str(meta.get(JobMetaKey.CLONED_FROM.value) or "")
        before = str(read_outcome(kit, follows).get("run", "")) if follows else ""
        folder = RunFolder.create_at(choose_run(study, runs_of(kit), before, bool(meta.get(AGAIN))), study)
        fl_ctx.get_engine().register_app_command("journal", _journal, folder)
        outcome: dict[str, Any] = {"job": job, "run": folder.path.name, "state": "running", "said": ""}
        write_json(outcome, outcome_path(kit, job))
        try:
            _wait_for(folder)
            line = _FlareLink(fl_ctx, kit, abort_signal, folder.path / "spool", study.plan.silence)
            said = ""
            if not folder.finished or folder.lacking:
                engine.run(study, FlareWire(study, folder, line, signer(kit)), folder)
            elif not follows:
                said = check_finished(study, folder, line)
            outcome |= {"state": "finished", "said": said or lacking(folder, job), "lacks": folder.lacking}
        except RestartJob as back:
            folder.note("going on", sites=back.sites, said=f"{back} came back; the run goes on as a new job")
            again_mark(kit, job).touch()
            outcome |= {"state": "going on", "said": f"{back} came back"}
        except (UserError, WorkError) as error:
            said = str(error).replace(command("resume", folder.path), command("federation", "resume", job))
            said = said.replace("consilium run STUDY.toml --again", "consilium federation submit STUDY.toml --again")
            outcome |= {"state": "stopped", "said": said}
            self.system_panic(said, fl_ctx)
        finally:
            if outcome["state"] == "running":
                outcome |= {"state": "failed", "said": "the server's own log says why"}
            with contextlib.suppress(
                OSError
            ):  # a full disk; the administrator says what to do where there are no results
                write_json(outcome, outcome_path(kit, job))
                _hand_out(folder, Path(workspace.get_run_dir(job)) / "results", outcome)

    def start_controller(self, fl_ctx: FLContext) -> None:
        pass

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass

    def process_result_of_unknown_task(self, *_: Any, **__: Any) -> ClientTask | None:
        return None
