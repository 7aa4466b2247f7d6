"""A server that does not keep to the rules: `python -m tests.federation.hostile_server KIT`.

NVIDIA FLARE's own server with the consortium's kit and none of our checks. Once its sites are there it sends what
comes on its input, one request to a site per line: `to`, `topic`, `body` and `headers` of the command, or `app`, a
folder whose files are the body. Every line of its output that begins with `:` says what came back.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.fuel.f3.mpm import MainProcessMonitor
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.private.admin_defs import Message
from nvflare.private.fed.app.server import server_train

PATIENCE = 5.0  # seconds for an answer


def open_up(kit: Path) -> None:
    """Take our settings out of the kit."""
    (kit / "local/comm_config.json").unlink(missing_ok=True)
    path = kit / "local/resources.json"
    settings = json.loads(path.read_text())
    settings |= {"class_allow_list": ["*"], "app_validator": None}
    for part in settings["components"]:
        if part["id"] == "process_launcher":
            part["path"] = "nvflare.app_common.job_launcher.server_process_launcher.ServerProcessJobLauncher"
    settings["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(kit / "snapshots")
    path.write_text(json.dumps(settings))


def send(request: dict[str, Any]) -> str:
    cell = CoreCell.ALL_CELLS["server"]
    app = request.get("app")
    body: Any = zip_directory_to_bytes(app, "") if app else request.get("body", "")
    command = Message(topic=request["topic"], body=body)
    for key, value in request.get("headers", {}).items():
        command.set_header(key, value)
    reply = cell.send_request("admin", "admin", request["to"], CellMessage(payload=command), PATIENCE)
    return f"{reply.get_header('cn__return_code')} {getattr(reply.payload, 'body', reply.payload)}"


def obey() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        end = time.monotonic() + 300
        while time.monotonic() < end and not (
            "server" in CoreCell.ALL_CELLS and request["to"] in CoreCell.ALL_CELLS["server"].agents
        ):
            time.sleep(0.2)
        print(f":{json.dumps(send(request))}", flush=True)


if __name__ == "__main__":
    kit = Path(sys.argv[1])
    open_up(kit)
    sys.argv[1:] = ["-m", str(kit), "-s", "fed_server.json", "--set", "secure_train=true", "org=consilium"]
    sys.argv += ["config_folder=config"]
    threading.Thread(target=obey, daemon=True).start()
    arguments = server_train.parse_arguments()
    sys.exit(MainProcessMonitor.run(main_func=server_train.main, run_dir=arguments.workspace, args=arguments))
