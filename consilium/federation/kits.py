"""Start-up kits: one folder per participant with its own certificate, made once by whoever runs the consortium.

NVIDIA FLARE makes the certificates and the settings; what is changed here: jobs are stored in the server's own folder,
nothing of a site's logs is sent to the server, and only `consilium` may be run by a job.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from nvflare.lighter.constants import CtxKey
from nvflare.lighter.ctx import ProvisionContext
from nvflare.lighter.entity import Participant
from nvflare.lighter.entity import Project as FlareProject
from nvflare.lighter.impl.cert import CertBuilder
from nvflare.lighter.impl.signature import SignatureBuilder
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provisioner import Provisioner

from consilium.errors import DataError, WorkError
from consilium.federation.project import OFFICE, Project
from consilium.federation.readme import write_readme
from consilium.files import write_json

ALLOWED = ["consilium.federation"]  # the only classes a job may name
RIGHTS = {  # of the office, everywhere: studies and nothing else; no code in jobs, no commands on other machines
    "format_version": "1.0",
    "permissions": {
        "project_admin": {
            **dict.fromkeys(("submit_job", "clone_job", "manage_job", "download_job", "view"), "any"),
            **dict.fromkeys(("operate", "shell_commands", "byoc", "server-predeployed-flwr"), "none"),
        }
    },
}


def make_kits(project: Project, to: Path) -> dict[str, Path]:
    """One kit per participant in `to`: `server`, `office` and the sites; the authority's key in `to/authority`."""
    if " " in str(to.resolve()):
        raise DataError(f"{to.resolve()} has a space in it, which NVIDIA FLARE cannot bear; choose another folder.")
    if (to / "authority").exists():
        raise DataError(f"{to} has kits already; new ones would not fit the old. Choose another folder.")
    to.mkdir(parents=True, exist_ok=True)
    participants = [
        Participant("server", project.server, "consilium", {"fed_learn_port": project.port}),
        *(Participant("client", name, "consilium", {"allow_log_streaming": False}) for name in project.sites),
        Participant("admin", OFFICE, "consilium", {"role": "project_admin"}),
    ]
    builders = [
        WorkspaceBuilder(template_file=["master_template.yml"]),
        StaticFileBuilder(config_folder="config", scheme="grpc"),
        CertBuilder(),
        SignatureBuilder(),
    ]
    kits = {"server": to / "server", "office": to / "office", **{name: to / name for name in project.sites}}
    with tempfile.TemporaryDirectory(dir=to) as draft:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            flare = FlareProject(project.name, "", participants)
            made: ProvisionContext = Provisioner(draft, builders).provision(flare)
        if made.get(CtxKey.BUILD_ERROR):
            raise WorkError(f"the kits could not be made: {said.getvalue().strip()}")
        folder = Path(made["current_prod_dir"])
        names = {"server": project.server, "office": OFFICE}
        for name, kit in kits.items():
            shutil.move(folder / names.get(name, name), kit)
            _settle(kit, name, project)
        shutil.move(folder.parent / "state", to / "authority")
        (to / "authority").chmod(0o700)
    return kits


def _settle(kit: Path, name: str, project: Project) -> None:
    """Our settings in place of the defaults."""
    write_json({"project": project.name, "name": name, "sites": list(project.sites)}, kit / "consilium.json")
    write_readme(kit, name)
    kit.chmod(0o700)
    if name == "office":
        return
    default = kit / "local" / "resources.json.default"
    settings: dict[str, Any] = json.loads(default.read_text(encoding="utf-8"))
    settings["class_allow_list"] = ALLOWED
    parts = {part["id"]: part for part in settings["components"]}
    if name == "server":
        settings["servers"][0]["heart_beat_timeout"] = 60
        parts["job_scheduler"]["args"] = {
            "max_jobs": 1,
            "max_schedule_count": 1_000_000,
            "min_schedule_interval": 1.0,
            "max_schedule_interval": 10.0,
        }
        del parts["log_receiver"]
        parts["returning"] = {"id": "returning", "path": "consilium.federation.returning.Returning", "args": {}}
    else:
        settings["allow_log_streaming"] = False
        del parts["site_log_streamer"]
    settings["components"] = list(parts.values())
    write_json(settings, kit / "local" / "resources.json")
    write_json(RIGHTS, kit / "local" / "authorization.json")
