"""The settings of a kit that keep it closed: written when it is made, and again whenever its process starts.

So kits made by earlier versions are closed too, and a kit that has been moved works. Other settings of the owner's
stay as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from consilium.federation.project import ROLES
from consilium.files import write_json

SERVER_CLASS = "consilium.federation.server_entry.ServerJob"
SITE_CLASS = "consilium.federation.site_entry.SiteJob"
SCHEME = "unix"  # of the connection between a participant's processes
FOLDER = "folder"  # the setting that says where its socket may be
LARGEST_MESSAGE = 64 << 20  # bytes of one message in memory; ours travel in parts of 16 MB
LARGEST_FRAME = (2 << 30) - (2 << 20)  # bytes; as NVIDIA FLARE sets it where nothing else is said
MOST = 100_000  # sites; who may take part is a matter of certificates
WATCHING = ("download_job", "view", "app_command")  # the one app command there is reads a journal
SUBMITTING = ("submit_job", "clone_job", "manage_job")
NOBODY = ("operate", "shell_commands", "byoc", "server-predeployed-flwr")
RIGHTS = {  # of administrators, everywhere: studies and nothing else; no code in jobs, no commands on other machines
    "format_version": "1.0",
    "permissions": {
        ROLES["submit"]: {**dict.fromkeys((*SUBMITTING, *WATCHING), "any"), **dict.fromkeys(NOBODY, "none")},
        ROLES["watch"]: {**dict.fromkeys(WATCHING, "any"), **dict.fromkeys((*SUBMITTING, *NOBODY), "none")},
    },
}
LAUNCHERS = "consilium.federation.launchers"
LOGS = ("log_receiver", "site_log_streamer")  # would send a site's logs to the server
SCRIPTS = (  # would start without these checks
    *("start.sh", "sub_start.sh", "stop_fl.sh", "docker.sh", "fl_admin.sh"),
    "system_info.ipynb",  # of an administrator
)


def close_kit(kit: Path, kind: str) -> None:
    """Our settings in place of NVIDIA FLARE's defaults; `kind` is server, site or admin."""
    for script in SCRIPTS:
        (kit / "startup" / script).unlink(missing_ok=True)
    if kind == "admin":
        return
    path = kit / "local" / "resources.json"
    source = path if path.exists() else path.with_name("resources.json.default")
    settings: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    parts = {part["id"]: part for part in settings["components"] if part["id"] not in LOGS}
    settings["class_allow_list"] = [SERVER_CLASS if kind == "server" else SITE_CLASS]
    settings["class_list_enforcement_mode"] = "enforce"
    settings["app_validator"] = {"path": f"{LAUNCHERS}.JobFilesValidator", "args": {}}
    if kind == "server":
        _set_server(settings, parts, kit)
    else:
        settings["allow_log_streaming"] = False
        parts["process_launcher"]["path"] = f"{LAUNCHERS}.SiteJobStarter"
    # `returning` first: the job that goes on is there before the scheduler hears that another may start
    settings["components"] = sorted(parts.values(), key=lambda part: part["id"] != "returning")
    _update(settings, path)
    _update(RIGHTS, kit / "local" / "authorization.json")
    _update(_communication(kit), kit / "local" / "comm_config.json")


def _set_server(settings: dict[str, Any], parts: dict[str, Any], kit: Path) -> None:
    settings["servers"][0]["heart_beat_timeout"] = 60
    settings["servers"][0]["max_num_clients"] = MOST
    settings["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(kit / "snapshots")
    parts["job_manager"]["args"]["uri_root"] = str(kit / "jobs")
    parts["job_scheduler"]["path"] = "consilium.federation.scheduling.JobScheduler"
    parts["job_scheduler"]["args"] = {
        "max_jobs": 1,
        "max_schedule_count": 1_000_000,
        "min_schedule_interval": 1.0,
        "max_schedule_interval": 10.0,
    }
    parts["process_launcher"]["path"] = f"{LAUNCHERS}.ServerJobStarter"
    parts["returning"] = {"id": "returning", "path": "consilium.federation.returning.Returning", "args": {}}


def _communication(kit: Path) -> dict[str, Any]:
    return {
        "allow_adhoc_conns": False,
        "max_message_size": LARGEST_MESSAGE,
        "streaming_max_blob_size": LARGEST_MESSAGE,
        "internal": {"scheme": SCHEME, "resources": {FOLDER: str(kit.resolve())}},
        "grpc": {  # a thread per connection, made when it is needed; NVIDIA FLARE's default ends at 100 sites
            "max_workers": MOST,
            "options": [[f"grpc.max_{way}_message_length", LARGEST_FRAME] for way in ("send", "receive")],
        },
    }


def _update(settings: dict[str, Any], path: Path) -> None:
    """Write settings only where they differ: a kit may lie on a disk that is read-only or full."""
    try:
        same = json.loads(path.read_text(encoding="utf-8")) == settings
    except (OSError, ValueError):
        same = False
    if not same:
        write_json(settings, path, private=True)
