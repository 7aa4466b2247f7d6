"""Part of the server: which job starts next. One runs at a time, the others wait in the order of submission."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Any

from nvflare.apis.job_def import JobMetaKey
from nvflare.app_common.job_schedulers.job_scheduler import DefaultJobScheduler

RECONNECT = 90.0  # seconds for the sites to connect again to a server that was started again


class JobScheduler(DefaultJobScheduler):  # type: ignore[misc]
    """After a start of the server it waits for all sites of the next job: they connect one after the other.

    NVIDIA FLARE alone would start a waiting job with the first site that is back, for good without the others.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._until = time.monotonic() + RECONNECT

    def schedule_job(self, job_manager: Any, job_candidates: Iterable[Any], fl_ctx: Any) -> Any:
        return super().schedule_job(job_manager, self.ready(job_candidates, fl_ctx.get_engine()), fl_ctx)

    def ready(self, jobs: Iterable[Any], engine: Any) -> list[Any]:
        """The jobs that may start now; one that waits for its sites is not overtaken."""
        in_line = sorted(jobs, key=lambda job: float(job.meta.get(JobMetaKey.SUBMIT_TIME.value, 0.0)))
        if time.monotonic() > self._until:
            return in_line
        here = {client.name for client in engine.get_clients()}
        return list(itertools.takewhile(lambda job: sites_of(job.meta) <= here, in_line))


def sites_of(meta: Mapping[str, Any]) -> set[str]:
    """The sites that a job is for."""
    places = meta.get(JobMetaKey.DEPLOY_MAP.value, {})
    return {str(site) for sites in places.values() for site in sites} - {"server"}
