"""The server signs every release with the key of its certificate; a hospital takes no other.

The connection proves that the server speaks. The signature stays with the file: whoever has the consortium's root
certificate can tell years later that this model, for this site and run, is what the server released.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_der_x509_certificate
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import VerificationError
from nvflare.lighter.utils import (
    load_crt,
    load_private_key_file,
    sign_content,
    verify_cert_chain,
    verify_content,
)

from consilium.federation.certificates import ROOT
from consilium.files import read_json
from consilium.messages import Request, Seal
from consilium.policy import Refused
from consilium.tree import Packet
from consilium.weights import SiteName
from consilium.wires import held


def signer(kit: Path) -> Callable[[SiteName, Request, str], Seal]:
    """What signs a request to deliver, with the header of its release, for one site."""
    key = load_private_key_file(str(kit / "startup" / "server.key"))
    certificate = told(kit / "startup" / "server.crt")
    return lambda site, request, header: Seal(sign_content(_statement(site, request, header), key), certificate)


def checker(kit: Path, site: SiteName) -> Callable[[Request, Packet], None]:
    """What refuses a release that the server of this kit's consortium has not signed for this site, as it is."""
    root = load_crt(str(kit / ROOT))
    servers = [str(server["identity"]) for server in read_json(kit / "startup" / "fed_client.json")["servers"]]

    def check(request: Request, packet: Packet) -> None:
        if request.seal is None:
            raise Refused("signature", "a release without a signature")
        if held.contents(packet) != request.tensors:
            raise Refused("signature", "the release is not what was signed")
        try:
            certificate = load_der_x509_certificate(b64decode(request.seal.certificate))
            verify_cert_chain(certificate, [], root)
            verify_content(_statement(site, request, packet.header), request.seal.signature, certificate.public_key())
            name = str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
        except (InvalidSignature, VerificationError, ValueError, IndexError) as error:
            raise Refused("signature", f"the release's signature does not hold ({type(error).__name__})") from error
        if name not in servers:
            raise Refused("signature", f"the release is signed by '{name}', which is not the server")

    return check


def told(certificate: Path) -> str:
    """A certificate as a seal holds it."""
    return b64encode(load_crt(certificate).public_bytes(Encoding.DER)).decode("ascii")


def _statement(site: SiteName, request: Request, header: str) -> str:
    """What is signed: whose release, of which run and round, and what is in it."""
    facts = {
        "site": site,
        "run": request.run,
        "method": request.method,
        "merged": request.merged,
        "header": header,
        "tensors": dict(request.tensors),
        "profile": request.profile and request.profile.to_json(),
    }
    return json.dumps(facts, sort_keys=True)
