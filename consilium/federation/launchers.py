"""Parts of a participant's process: what checks a job's files, and what starts a job's process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from nvflare.apis.app_validation import AppValidator
from nvflare.apis.fl_constant import FLContextKey, JobConstants
from nvflare.apis.job_launcher_spec import JobProcessArgs
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle, ProcessJobLauncher
from nvflare.fuel.common.exit_codes import ProcessExitCode
from nvflare.utils.job_launcher_utils import get_client_job_args, get_credential_env, get_server_job_args
from nvflare.utils.process_utils import spawn_process

from consilium.federation import job_files
from consilium.federation.cell_policy import JOB


class JobFilesValidator(AppValidator):  # type: ignore[misc]
    """Looks at a job's files when they arrive."""

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        app = Path(app_folder)  # KIT/JOB/app_SITE
        return job_files.fault(app, app.parents[1]), {}


class ServerJobHandle(ProcessHandle):  # type: ignore[misc]
    """A server's job process. One that a signal ended, as when memory is short, has not failed by itself."""

    def poll(self) -> int:
        code = self.adapter.poll()
        killed = code is not None and code < -1  # −1: NVIDIA FLARE does not know
        return ProcessExitCode.INFRASTRUCTURE_ERROR if killed else int(super().poll())


class JobStarter(ProcessJobLauncher):  # type: ignore[misc]
    """Starts a job's process through `consilium.federation.start`; nothing a job says reaches its command."""

    role = ""
    arguments: tuple[str, ...] = ()
    handle: type[ProcessHandle] = ProcessHandle

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: Any) -> Any:
        given = fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS)
        job = str(job_meta.get(JobConstants.JOB_ID))
        if not JOB.fullmatch(job):
            raise ValueError(f"{job!r} is not a job's name")
        command = [sys.executable, "-u", "-m", "consilium.federation.start", self.role]
        for name in self.arguments:
            if name in given:
                option, value = given[name]
                command += [option, *(str(value).split() if name == JobProcessArgs.OPTIONS else [str(value)])]
        return self.handle(process_adapter=spawn_process(command, {**os.environ, **get_credential_env(given)}))

    def get_command(self, job_meta: Any, fl_ctx: Any) -> str:
        raise NotImplementedError  # only the original's launch_job asks


class SiteJobStarter(JobStarter):
    role = "site-job"
    arguments = tuple(get_client_job_args(include_exe_module=False))


class ServerJobStarter(JobStarter):
    role = "server-job"
    handle = ServerJobHandle
    arguments = tuple(get_server_job_args(include_exe_module=False))
