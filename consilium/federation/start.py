"""How every process of a federation starts: `python -m consilium.federation.start site|server|site-job|server-job …`.

NVIDIA FLARE's own start would answer commands from anyone in its network. Here a process is first reduced to what a
study needs (`cell_guard`, the commands below), and then given to NVIDIA FLARE.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.apis.workspace import Workspace
from nvflare.fuel.f3.mpm import MainProcessMonitor
from nvflare.fuel.hci.reg import CommandRegister
from nvflare.fuel.sec.audit import Auditor
from nvflare.private.admin_defs import error_reply
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.app.utils import version_check
from nvflare.private.fed.client.admin import RequestProcessor
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from consilium.federation import job_files
from consilium.federation.cell_guard import guard_cells
from consilium.federation.cell_policy import JOB
from consilium.federation.connection_guard import bind_sessions, guard_connections, watch_server
from consilium.federation.returning import tolerate_failed_sites

# What a site does for the server: see whether there is room, take a job's files, start it, stop it. No shell, no
# restart, no other look at the machine.
SITE_PROCESSORS = (
    *("CheckResourceProcessor", "CancelResourceProcessor", "DeployProcessor", "StartJobProcessor"),
    *("AbortAppProcessor", "NotifyJobStatusProcessor"),
)
# What the server does for the administrator.
ADMIN_COMMANDS = (
    *("_cert_login", "_logout", "_commands", "check_status", "list_jobs", "get_job_meta"),
    *("submit_job", "clone_job", "abort_job", "download_job", "app_command"),
)


class JobNameCheck(RequestProcessor):  # type: ignore[misc]
    """Does what another processor does, for requests about a job that has a job's name: it becomes a folder's."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def get_topics(self) -> Any:
        return self.inner.get_topics()

    def process(self, req: Any, app_ctx: Any) -> Any:
        if not JOB.fullmatch(str(req.get_header(RequestHeader.JOB_ID))):
            return error_reply("not a job's name")
        return self.inner.process(req, app_ctx)


def limit_site() -> None:
    """Leave a site only the processors a study needs."""
    kept = [each for each in ClientRequestProcessors.request_processors if type(each).__name__ in SITE_PROCESSORS]
    ClientRequestProcessors.request_processors[:] = [JobNameCheck(each) for each in kept]


def limit_server() -> None:
    """Leave the server only the commands the administrator needs."""
    add: Callable[..., Any] = CommandRegister.add_command

    def add_if_needed(register: Any, scope_name: str, cmd_name: str, *arguments: Any, **named: Any) -> None:
        if cmd_name in ADMIN_COMMANDS:
            add(register, scope_name, cmd_name, *arguments, **named)

    CommandRegister.add_command = add_if_needed


def keep_answering_on_full_disks() -> None:
    """Answer also when the log of who asked what cannot be written: the last lines wait in memory for room."""
    add: Callable[..., str] = Auditor.add_event

    def add_if_possible(auditor: Any, *arguments: Any, **named: Any) -> str:
        try:
            return add(auditor, *arguments, **named)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return ""

    Auditor.add_event = add_if_possible


def check_job(workspace: str, site: str, job: str) -> None:
    """End here if a job's files are not those of a study, whoever put them there."""
    if not JOB.fullmatch(job):
        raise SystemExit(f"{job!r} is not a job's name")
    app = Path(Workspace(workspace, site, "config").get_app_dir(job))
    wrong = job_files.fault(app, Path(workspace))
    if wrong:
        raise SystemExit(wrong)


def main(role: str) -> int:
    """Start as `role`; NVIDIA FLARE reads the rest of the command line."""
    os.umask(0o077)
    guard_cells()
    keep_answering_on_full_disks()
    if role == "site":
        from nvflare.private.fed.app.client import client_train as program

        version_check()
        limit_site()
    elif role == "server":
        from nvflare.private.fed.app.server import server_train as program

        version_check()
        limit_server()
        bind_sessions()
        tolerate_failed_sites()
    elif role == "site-job":
        from nvflare.private.fed.app.client import worker_process as program
    elif role == "server-job":
        from nvflare.private.fed.app.server import runner_process as program
    else:
        raise SystemExit(f"there is no role {role!r}")
    arguments = program.parse_arguments()
    folder = arguments.workspace
    if role == "server":
        guard_connections(Path(folder))
    elif role == "site":
        watch_server(Path(folder))
    if role.endswith("-job"):
        check_job(arguments.workspace, getattr(arguments, "client_name", "server"), arguments.job_id)
        folder = os.path.join(arguments.workspace, arguments.job_id)
    return int(MainProcessMonitor.run(main_func=program.main, run_dir=folder, args=arguments) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv.pop(1)))
