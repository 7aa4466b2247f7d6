"""Start-up kits: one folder per participant with its own certificate, made once by whoever runs the consortium.

NVIDIA FLARE makes the certificates and the settings; `kit_settings` closes what a study does not need. A kit and the
authority's folder are their owner's alone: 0700 and 0600, whatever the umask is.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from pathlib import Path

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
from consilium.federation.kit_settings import close_kit
from consilium.federation.project import OFFICE, Project
from consilium.federation.readme import write_readme
from consilium.files import write_json


def make_kits(project: Project, to: Path) -> dict[str, Path]:
    """One kit per participant in `to`: `server`, `office` and the sites; the authority's key in `to/authority`."""
    if " " in str(to.resolve()):
        raise DataError(f"{to.resolve()} has a space in it, which NVIDIA FLARE cannot bear; choose another folder.")
    if (to / "authority").exists():
        raise DataError(f"{to} has kits already; new ones would not fit the old. Choose another folder.")
    to.mkdir(mode=0o700, parents=True, exist_ok=True)
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
            write_json({"project": project.name, "name": name, "sites": list(project.sites)}, kit / "consilium.json")
            write_readme(kit, name)
            close_kit(kit, name if name in ("server", "office") else "site")
            make_private(kit)
        make_private(folder.parent / "state")
        shutil.move(folder.parent / "state", to / "authority")
    return kits


def make_private(folder: Path) -> None:
    """Nobody but the owner reads what is in a folder."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
