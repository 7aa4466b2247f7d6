"""Part of the server: notices sites that come back while a run goes on without them, and lets them in again.

NVIDIA FLARE does not restart a running job at a site that died and returned. So the run stops between two rounds and
goes on as a new job, in which the site takes part.
"""

from __future__ import annotations

from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import RunProcessKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.utils.job_utils import get_event_job_id

from consilium.federation.places import again_mark, returned_folder
from consilium.files import read_json

KEPT = (
    *(JobMetaKey.JOB_NAME, JobMetaKey.JOB_FOLDER_NAME, JobMetaKey.DEPLOY_MAP, JobMetaKey.RESOURCE_SPEC),
    *(JobMetaKey.CONTENT_LOCATION, JobMetaKey.RESULT_LOCATION, JobMetaKey.APPROVALS, JobMetaKey.MIN_CLIENTS),
    *(JobMetaKey.DATA_STORAGE_FORMAT, JobMetaKey.STUDY),
    *(JobMetaKey.SUBMITTER_NAME, JobMetaKey.SUBMITTER_ORG, JobMetaKey.SUBMITTER_ROLE),
)


class Returning(FLComponent):  # type: ignore[misc]
    """Listens to the server's events."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.CLIENT_REGISTER_PROCESSED:
            self._came(fl_ctx)
        elif event_type == EventType.JOB_COMPLETED:
            self._over(str(get_event_job_id(fl_ctx)), fl_ctx)

    def _came(self, fl_ctx: FLContext) -> None:
        """A site that registered after a job began has no process in it.

        What the message says of its sender is not used: FLARE sends this event also for registrations it refused. The
        server's own list holds only clients whose certificate was checked, each under a new token.
        """
        engine = fl_ctx.get_engine()
        kit = _kit(fl_ctx)
        sites = set(read_json(kit / "consilium.json")["sites"])
        for job, process in list(engine.run_processes.items()):
            started = process.get(RunProcessKey.PARTICIPANTS) or {}
            for token, client in list(engine.client_manager.clients.items()):
                if token not in started and client.name in sites:
                    (returned_folder(kit, job) / client.name).touch()

    def _over(self, job: str, fl_ctx: FLContext) -> None:
        mark = again_mark(_kit(fl_ctx), job)
        if not mark.exists():
            return
        manager = fl_ctx.get_engine().get_component(SystemComponents.JOB_MANAGER)
        before = manager.get_job(job, fl_ctx).meta
        meta = {key.value: before[key.value] for key in KEPT if key.value in before}
        meta[JobMetaKey.CLONED_FROM.value] = job
        new = manager.clone(from_jid=job, meta=meta, fl_ctx=fl_ctx)
        self.log_info(fl_ctx, f"job {job} goes on as {new.get(JobMetaKey.JOB_ID.value)}", fire_event=False)
        mark.unlink()


def _kit(fl_ctx: FLContext) -> Path:
    return Path(fl_ctx.get_engine().get_workspace().get_root_dir())
