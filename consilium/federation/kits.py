"""Start-up kits: one folder per participant with its own certificate, made by whoever runs the consortium.

NVIDIA FLARE makes the certificates and the settings; `kit_settings` closes what a study does not need. A kit and the
authority's folder are their owner's alone: 0700 and 0600, whatever the umask is. All kits are made at once by
`make_kits`; later, one participant at a time joins, gets a new certificate, or loses it.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
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
from consilium.federation.authority import Authority, read_authority
from consilium.federation.certificates import AHEAD, REVOKED
from consilium.federation.kit_settings import close_kit
from consilium.federation.project import ROLES, Project, admin_user, read_project
from consilium.federation.readme import write_readme
from consilium.files import read_json, write_bytes, write_json, write_text

ROOT_DAYS = 3650  # the authority's own certificate; those of participants end after 360 days, and can be renewed


def make_kits(project: Project, to: Path) -> dict[str, Path]:
    """One kit per participant in `to`: `server`, `admin` and the sites; the authority's key in `to/authority`."""
    if " " in str(to.resolve()):
        raise DataError(
            f"{to.resolve()} has a space in it, which NVIDIA FLARE does not support; choose another folder."
        )
    if (to / "authority").exists():
        raise DataError(
            f"{to} has kits already; new ones would not fit the old. Choose another folder; for one participant there "
            "are `kits add` and `kits renew`."
        )
    to.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = project.participants
    kits = {name: to / name for name in names}
    with _drafts(project, names, to) as (drafts, state):
        for name, kit in kits.items():
            shutil.move(drafts[name], kit)
        issued = {_user(project, name): name for name in names}
        read_authority(state, issued).write(to / "authority")
    return kits


def add_kit(file: Path, name: str, role: str, to: Path) -> Path:
    """The kit of one participant more; `role` is site, submit or watch. The others' kits stay as they are."""
    project = read_project(file)
    authority = _authority(project, to)
    if name in authority.issued:
        if name not in project.participants:
            raise DataError(
                f"'{name}' had a kit before; write '{name}' into {file} again, then `consilium federation kits renew`."
            )
        raise DataError(f"'{name}' has a kit already; `consilium federation kits renew` makes a new certificate.")
    if name not in (*project.sites, *project.admins):
        joined = project.joined_by(name, role)
        if file.read_text(encoding="utf-8") != project.text():
            where = "the list `sites`" if role == "site" else "the table `admins`"
            raise DataError(f"write '{name}' into {where} of {file}, which you have edited, and repeat this command.")
        write_text(joined.text(), file)
        project = joined
    elif project.role(name) != role:
        raise DataError(f"{file} says that '{name}' is '{project.role(name)}', not '{role}'.")
    kit = _issue(project, name, authority, to)
    for path in to.glob(
        "*/consilium.json"
    ):  # of those who have their kits elsewhere, the server knows who is connected
        write_json({**read_json(path), "sites": list(project.sites)}, path, private=True)
    return kit


def renew_kit(file: Path, name: str, to: Path) -> Path:
    """A new certificate and key for one participant: in its kit if that is in `to`, else in a new kit."""
    project = read_project(file)
    project.role(name)
    authority = _authority(project, to)
    if name not in authority.issued:
        raise DataError(f"'{name}' has no certificate yet; `consilium federation kits add` makes its kit.")
    return _issue(project, name, authority, to)


def revoke_kit(file: Path, name: str, to: Path) -> Path:
    """The new list of revoked certificates, with every certificate that a participant has so far."""
    authority = _authority(read_project(file), to)
    if name == "server":
        raise DataError(
            "the sites know the server by the authority alone and keep no list, so its certificate cannot be revoked; "
            "make a new set of kits in another folder."
        )
    changed = authority.revoke(name)
    changed.write(to / "authority")
    write_bytes(changed.revoked_list(), to / REVOKED, durable=True, private=True)
    for kit in _kits_in(to):
        shutil.copy(to / REVOKED, kit / f".{REVOKED}")
        (kit / f".{REVOKED}").replace(kit / REVOKED)  # a server may be reading it
    return to / REVOKED


def describe_kits(file: Path, to: Path) -> list[str]:
    """One line per participant: what it is, and until when its certificate is valid."""
    project = read_project(file)
    authority = _authority(project, to)
    lines = []
    for name in authority.issued:
        last = authority.certificates(name)[-1]
        role = project.role(name) if name in project.participants else "not in the project file"
        end = "revoked" if last.serial in authority.revoked else last.validity()
        lines.append(f"{name}  {role}  {end}")
    return lines


def _authority(project: Project, to: Path) -> Authority:
    """The authority beside the kits; private keys of participants that an earlier version left there go."""
    found = read_authority(to / "authority", {_user(project, name): name for name in project.participants})
    found.write(to / "authority")
    return found


def _issue(project: Project, name: str, authority: Authority, to: Path) -> Path:
    end = authority.root_certificate.not_valid_after_utc
    if end - datetime.now(UTC) < AHEAD:
        raise DataError(
            f"the authority's own certificate ends on {end:%Y-%m-%d}, and so would every new one; make a new set of "
            "kits in another folder."
        )
    kit = to / name
    with _drafts(project, tuple({"server": 0, name: 0}), to, authority) as (drafts, _):
        draft = drafts[name]
        pem = next(iter((draft / "startup").glob("*.crt"))).read_bytes()
        authority.issue(name, pem).write(to / "authority")  # first: what is not written down could not be revoked
        if (to / REVOKED).is_file():
            shutil.copy(to / REVOKED, draft / REVOKED)
        if kit.exists():
            for path in sorted((draft / "startup").iterdir()):  # cut short, the command is repeated
                write_bytes(path.read_bytes(), kit / "startup" / path.name, durable=True, private=True)
        else:
            shutil.move(draft, kit)
    return kit


@contextlib.contextmanager
def _drafts(
    project: Project, names: Sequence[str], to: Path, authority: Authority | None = None
) -> Iterator[tuple[dict[str, Path], Path]]:
    """Kits of these participants, and the state in which NVIDIA FLARE leaves the authority; gone with the block."""
    root = (authority.root.encode(), authority.private_key) if authority else (None, None)
    with tempfile.TemporaryDirectory(dir=to) as place:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            participants = [_participant(project, name) for name in names]
            flare = FlareProject(project.name, "", participants, None, *root)
            made: ProvisionContext = Provisioner(place, _builders()).provision(flare)
        if made.get(CtxKey.BUILD_ERROR):
            raise WorkError(f"the kits could not be made: {said.getvalue().strip()}")
        folder = Path(made["current_prod_dir"])
        kits = {name: folder / _user(project, name) for name in names}
        for name, kit in kits.items():
            role = project.role(name)
            facts = {"project": project.name, "name": name, "role": role, "user": _user(project, name)}
            write_json({**facts, "sites": list(project.sites)}, kit / "consilium.json")
            write_readme(kit, name, role)
            close_kit(kit, "admin" if role in ROLES else role)
            make_private(kit)
        yield kits, folder.parent / "state"


def _builders() -> list[object]:
    return [
        WorkspaceBuilder(template_file=["master_template.yml"]),
        StaticFileBuilder(config_folder="config", scheme="grpc"),
        CertBuilder(root_valid_days=ROOT_DAYS),
        SignatureBuilder(),
    ]


def _participant(project: Project, name: str) -> Participant:
    role, user = project.role(name), _user(project, name)
    if role == "server":
        return Participant("server", user, "consilium", {"fed_learn_port": project.port})
    if role == "site":
        return Participant("client", user, "consilium", {"allow_log_streaming": False})
    return Participant("admin", user, "consilium", {"role": ROLES[role]})


def _user(project: Project, name: str) -> str:
    """The name on a participant's certificate."""
    role = project.role(name)
    return project.server if role == "server" else admin_user(name) if role in ROLES else name


def _kits_in(to: Path) -> list[Path]:
    return [path.parent for path in to.glob("*/consilium.json")]


def make_private(folder: Path) -> None:
    """Nobody but the owner reads what is in a folder."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
