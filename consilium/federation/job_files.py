"""The files of a job: two fixed documents and a study. A job with anything else is not run.

NVIDIA FLARE builds whatever classes a job's documents name, with whatever arguments, and puts a job's code folder on
the path. Here a job says nothing but which study to run, and the administrator has signed it.
"""

from __future__ import annotations

import json
from pathlib import Path

from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE
from nvflare.lighter.utils import verify_folder_signature_and_get_signers

from consilium.errors import DataError
from consilium.federation.certificates import ROOT, read_revoked, shown
from consilium.federation.kit_settings import SERVER_CLASS, SITE_CLASS
from consilium.federation.project import SUBMITS, is_admin

STUDY = "study.toml"
SIGNATURE = (NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE)  # in every folder of a job
LARGEST_STUDY = 1 << 20  # bytes

DOCUMENTS = {
    "config_fed_server.json": json.dumps(
        {"format_version": 2, "workflows": [{"id": "run", "path": SERVER_CLASS, "args": {}}]}
    ).encode(),
    "config_fed_client.json": json.dumps(
        {"format_version": 2, "executors": [{"tasks": ["*"], "executor": {"path": SITE_CLASS, "args": {}}}]}
    ).encode(),
}


def write_app(folder: Path, study: str) -> None:
    """The files of a job that runs a study."""
    config = folder / "config"
    config.mkdir(parents=True)
    for name, document in DOCUMENTS.items():
        (config / name).write_bytes(document)
    (config / STUDY).write_text(study, encoding="utf-8")


def fault(app: Path, kit: Path) -> str:
    """Why the files in `app` are not those of a study's job, to the participant with this kit; empty if they are."""
    found = {path.relative_to(app).as_posix(): path for path in app.rglob("*")}
    strange = [name for name, path in found.items() if path.is_symlink() or not (path.is_file() or name == "config")]
    files = {name: path for name, path in found.items() if path.is_file() and path.name not in SIGNATURE}
    wanted = {f"config/{name}" for name in (*DOCUMENTS, STUDY)}
    if strange or files.keys() != wanted:
        names = ", ".join(sorted({*strange, *(files.keys() ^ wanted)}))
        return f"a job holds two fixed documents and a study, and this one differs in: {names[:200]}"
    for name, document in DOCUMENTS.items():
        if files[f"config/{name}"].read_bytes() != document:
            return f"{name} is not the document of this version of consilium"
    if files[f"config/{STUDY}"].stat().st_size > LARGEST_STUDY:
        return f"{STUDY} is larger than {LARGEST_STUDY} bytes"
    valid, signers = verify_folder_signature_and_get_signers(str(app), str(kit / ROOT))
    if not valid or not signers or not all(is_admin(name) and role == SUBMITS for name, _, role in signers):
        return "the administrator has not signed this job"
    return _revoked(app, kit)


def _revoked(app: Path, kit: Path) -> str:
    try:
        gone = read_revoked(kit).serials
    except DataError as error:
        return str(error)
    used = [shown(path.read_bytes()) for path in app.rglob(NVFLARE_SUBMITTER_CRT_FILE)]
    names = sorted({one.name for one in used if one.serial in gone})
    return f"the certificate of {', '.join(names)}, who signed this job, was revoked" if names else ""
