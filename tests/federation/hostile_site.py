"""A site of the consortium that does not keep to the rules: `python -m tests.federation.hostile_site KIT < requests`.

It joins with its own kit, as any site does, and then sends what the test asks for. Every line of the input is one
request as JSON: `to`, `channel`, `topic`, the `body` of a command, and headers that replace the sender's own. Every
line of the output says what came back.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.fuel.sec.authn import set_add_auth_headers_filters
from nvflare.private.admin_defs import Message
from nvflare.private.defs import ClientType
from nvflare.private.fed.authenticator import Authenticator
from nvflare.private.fed.utils.fed_utils import nvflare_fobs_initialize

PATIENCE = 1.5  # seconds for an answer


def join(kit: Path, name: str) -> Cell:
    """Connect and register with the kit's certificate."""
    settings = json.loads((kit / "startup/fed_client.json").read_text())["servers"][0]
    own = {what: str(kit / "startup" / what) for what in ("client.crt", "client.key", "rootCA.pem")}
    credentials = {
        DriverParams.CA_CERT.value: own["rootCA.pem"],
        DriverParams.CLIENT_CERT.value: own["client.crt"],
        DriverParams.CLIENT_KEY.value: own["client.key"],
        DriverParams.CONNECTION_SECURITY.value: "mtls",
    }
    url = f"grpc://{settings['service']['target']}"
    cell = Cell(fqcn=name, root_url=url, secure=True, credentials=credentials, auth_identity=name)
    cell.start()
    known = Authenticator(
        cell=cell,
        project_name=settings["name"],
        client_name=name,
        client_type=ClientType.REGULAR,
        expected_sp_identity=settings["identity"],
        secure_mode=True,
        root_cert_file=own["rootCA.pem"],
        private_key_file=own["client.key"],
        cert_file=own["client.crt"],
        msg_timeout=10.0,
        retry_interval=1.0,
    )
    context = FLContext()
    context.set_prop("__identity_name__", name, private=False)
    token, signature, session, _ = known.authenticate(context, Signal())
    set_add_auth_headers_filters(cell, name, token, signature, session)
    return cell


def ask(cell: Cell, request: dict[str, Any]) -> str:
    """Send one request, with headers as the test wants them; what came back, as text."""
    content: Any = Message(topic=request["topic"], body=request.get("body", ""))
    if "identity" in request:  # a message of a job rather than a command
        content = Shareable()
        content.set_peer_props({"__identity_name__": request["identity"]})
    sent = CellMessage(payload=content)
    replaced = request.get("headers", {})
    send = CoreCell._send_to_endpoint

    def forged(core: Any, to_endpoint: Any, message: Any) -> Any:
        message.headers.update(replaced)
        return send(core, to_endpoint, message)

    CoreCell._send_to_endpoint = forged
    try:
        reply = cell.core_cell.send_request(request["channel"], request["topic"], request["to"], sent, PATIENCE)
    finally:
        CoreCell._send_to_endpoint = send
    content = reply.payload
    return f"{reply.get_header('cn__return_code')} {getattr(content, 'body', content)}"


def main(kit: Path, name: str) -> None:
    nvflare_fobs_initialize()
    cell = join(kit, name)
    print("joined", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(ask(cell, request)), flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    finally:
        sys.stdout.flush()
        os._exit(0)  # threads of the network would go on
