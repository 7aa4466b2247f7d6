"""Part of the server: lets sites in again that come back, and goes on with runs whose process died.

NVIDIA FLARE does not restart a running job at a site that died and returned, nor a job whose server died. So the run
goes on as a new job, from the last round it committed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import RunProcessKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.apis.utils.job_utils import get_event_job_id

from consilium.errors import RunError
from consilium.federation.cell_policy import address
from consilium.federation.places import again_mark, outcome_path, returned_folder, runs_of
from consilium.files import read_json, write_json

KEPT = (
    *(JobMetaKey.JOB_NAME, JobMetaKey.JOB_FOLDER_NAME, JobMetaKey.DEPLOY_MAP, JobMetaKey.RESOURCE_SPEC),
    *(JobMetaKey.CONTENT_LOCATION, JobMetaKey.RESULT_LOCATION, JobMetaKey.APPROVALS, JobMetaKey.MIN_CLIENTS),
    *(JobMetaKey.DATA_STORAGE_FORMAT, JobMetaKey.STUDY),
    *(JobMetaKey.SUBMITTER_NAME, JobMetaKey.SUBMITTER_ORG, JobMetaKey.SUBMITTER_ROLE),
)
OUTCOME, FOLLOWED_BY = "consilium_outcome", "consilium_followed_by"  # what the administrator reads of a job
AGAIN = "consilium_again"  # of a job: make a new run of the study, though there is one
NO_RESUME = "CONSILIUM_NO_RESUME"  # set: a person resumes runs whose server died
CRASHES = 3  # in a row, without a round between them, after which a person has to look
JUST_BEHIND = 1e-3  # seconds; a job takes the place of the one that it follows, and is listed after it


class Returning(FLComponent):  # type: ignore[misc]
    """Listens to the server's events."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            self._started(fl_ctx)
        elif event_type == EventType.CLIENT_REGISTER_PROCESSED:
            self._came(fl_ctx)
        elif event_type == EventType.JOB_STARTED:
            self._began(str(get_event_job_id(fl_ctx)), fl_ctx)
        elif event_type == EventType.JOB_COMPLETED:
            self._over(str(get_event_job_id(fl_ctx)), fl_ctx)

    def _came(self, fl_ctx: FLContext) -> None:
        """A site that registered after a job began has no process in it.

        What the message says of its sender is not used: FLARE sends this event also for registrations it refused. The
        server's own list holds only clients whose certificate was checked, each under a new token.
        """
        engine = fl_ctx.get_engine()
        kit = _kit(fl_ctx)
        for job, process in list(engine.run_processes.items()):
            started = process.get(RunProcessKey.PARTICIPANTS) or {}
            for token, client in list(engine.client_manager.clients.items()):
                named = address(client.name)
                if token not in started and named is not None and named.kind == "site":
                    (returned_folder(kit, job) / client.name).touch()

    def _started(self, fl_ctx: FLContext) -> None:
        """The server has just started: a job that is shown as running died with the process before."""
        manager = _jobs(fl_ctx)
        for job in manager.get_jobs_by_status([RunStatus.RUNNING, RunStatus.DISPATCHED], fl_ctx):
            manager.set_status(job.job_id, RunStatus.FINISHED_ABNORMAL, fl_ctx)
            self._died(job.job_id, fl_ctx)

    def _began(self, job: str, fl_ctx: FLContext) -> None:
        """Link the job that this one follows to it, also if a person asked for it."""
        manager = _jobs(fl_ctx)
        before = manager.get_job(job, fl_ctx).meta.get(JobMetaKey.CLONED_FROM.value)
        if before and manager.get_job(before, fl_ctx) is not None:
            manager.update_meta(before, {FOLLOWED_BY: job}, fl_ctx)

    def _over(self, job: str, fl_ctx: FLContext) -> None:
        mark = again_mark(_kit(fl_ctx), job)
        outcome = read_outcome(_kit(fl_ctx), job)
        if mark.exists():
            self._go_on(job, fl_ctx)
            mark.unlink()
        elif outcome.get("state") == "running":  # its process ended without a word
            status = _jobs(fl_ctx).get_job(job, fl_ctx).meta.get(JobMetaKey.STATUS.value)
            if status == RunStatus.FINISHED_ABNORMAL.value:  # killed; else it could not write, as on a full disk
                self._died(job, fl_ctx)
            return
        _jobs(fl_ctx).update_meta(job, {OUTCOME: outcome}, fl_ctx)

    def _died(self, job: str, fl_ctx: FLContext) -> None:
        """Go on with the run of a job whose process died, unless a person does that or it dies again and again."""
        kit = _kit(fl_ctx)
        outcome = died(kit, job, _jobs(fl_ctx).get_job(job, fl_ctx).meta.get(JobMetaKey.CLONED_FROM.value, ""))
        write_json(outcome, outcome_path(kit, job))
        _jobs(fl_ctx).update_meta(job, {OUTCOME: outcome}, fl_ctx)
        if outcome["again"]:
            self._go_on(job, fl_ctx)

    def _go_on(self, job: str, fl_ctx: FLContext) -> None:
        """A new job of the same study, before all that wait; the run folder says from which round."""
        manager = _jobs(fl_ctx)
        before = manager.get_job(job, fl_ctx).meta
        meta = {key.value: before[key.value] for key in KEPT if key.value in before}
        meta[JobMetaKey.CLONED_FROM.value] = job
        new = manager.clone(from_jid=job, meta=meta, fl_ctx=fl_ctx).get(JobMetaKey.JOB_ID.value)
        place = float(before[JobMetaKey.SUBMIT_TIME.value]) + JUST_BEHIND
        manager.update_meta(new, {JobMetaKey.SUBMIT_TIME.value: place}, fl_ctx)
        manager.update_meta(job, {FOLLOWED_BY: new}, fl_ctx)
        self.log_info(fl_ctx, f"job {job} goes on as {new}", fire_event=False)


def died(kit: Path, job: str, before: str) -> dict[str, Any]:
    """The outcome of a job whose process died. `again`: the server goes on with its run by itself.

    `before` is the job that this one followed, or empty.
    """
    outcome = read_outcome(kit, job)
    run = str(outcome.get("run", ""))
    rounds = _rounds(runs_of(kit) / run / "journal.jsonl") if run else 0
    last = read_outcome(kit, before) if before else {}
    stuck = last.get("state") == "crashed" and last.get("rounds") == rounds
    crashes = int(last.get("crashes", 0)) + 1 if stuck else 1
    again = crashes < CRASHES and not os.environ.get(NO_RESUME)
    said = "the server's process of this job died; everything committed is saved. "
    if again:
        said += "The run goes on as a new job by itself."
    elif crashes >= CRASHES:
        said += f"It died {crashes} times without making a round: look at its log, then "
        said += f"`consilium federation resume {job}`."
    else:
        said += f"`consilium federation resume {job}` goes on."
    facts = {"state": "crashed", "said": said, "rounds": rounds, "crashes": crashes, "again": again}
    return {"job": job, "run": run, **outcome, **facts}


def tolerate_failed_sites() -> None:
    """A site whose process ended is away; NVIDIA FLARE 2.9 would end the job, for everyone."""
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellReturnCode
    from nvflare.fuel.f3.cellnet.utils import make_reply
    from nvflare.private.defs import CellMessageHeaderKeys, JobFailureMsgKey
    from nvflare.private.fed.server.fed_server import FederatedServer

    def ended(server: Any, request: Any) -> Any:
        client = server.client_manager.clients.get(request.get_header(CellMessageHeaderKeys.TOKEN))
        sender = str(request.get_header(MessageHeaderKey.ORIGIN)).partition(".")[0]
        if client is None or client.name != sender or not isinstance(request.payload, Mapping):
            return make_reply(CellReturnCode.UNAUTHENTICATED, "", None)
        job = request.payload.get(JobFailureMsgKey.JOB_ID)
        if isinstance(job, str) and job in server.engine.run_processes:
            kit = Path(server.engine.get_workspace().get_root_dir())
            (returned_folder(kit, job) / client.name).touch()  # it waits for a new job, like one that started again
        server.engine.job_runner.resolve_client_outcome(job, client.name)
        return make_reply(CellReturnCode.OK, "", None)

    FederatedServer.process_job_failure = ended


def read_outcome(kit: Path, job: str) -> dict[str, Any]:
    """How a job ended, as it wrote it down; empty if it has not."""
    with contextlib.suppress(RunError):
        found: dict[str, Any] = read_json(outcome_path(kit, job))
        return found
    return {}


def _rounds(journal: Path) -> int:
    """How many rounds a run has made."""
    try:
        return journal.read_text(encoding="utf-8").count('"event": "round"')
    except OSError:
        return 0


def _jobs(fl_ctx: FLContext) -> Any:
    return fl_ctx.get_engine().get_component(SystemComponents.JOB_MANAGER)


def _kit(fl_ctx: FLContext) -> Path:
    return Path(fl_ctx.get_engine().get_workspace().get_root_dir())
