"""The authority: its key, which certificates it has issued, and which of them it has revoked.

Its folder belongs to the consortium and stays offline. It holds no participant's private key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from consilium.errors import DataError
from consilium.federation.certificates import Certificate, shown, sign_revoked
from consilium.files import make_folder, read_json, write_json

FILE = "cert.json"
REMEDY = "restore it from a backup, or make a new set of kits in another folder with `consilium federation kits`"
_ROOT, _KEY = "root_cert", "root_pri_key"  # as NVIDIA FLARE calls them


@dataclass(frozen=True)
class Authority:
    """The state of `kits/authority`."""

    root: str  # PEM
    key: str  # PEM
    issued: Mapping[str, tuple[str, ...]]  # certificates (PEM) by participant, the newest last
    revoked: Mapping[int, datetime]  # by serial number: since when
    number: int = 0  # of the list of revoked certificates

    def certificates(self, name: str) -> list[Certificate]:
        return [shown(pem.encode()) for pem in self.issued.get(name, ())]

    def issue(self, name: str, pem: bytes) -> Authority:
        return replace(self, issued={**self.issued, name: (*self.issued.get(name, ()), pem.decode())})

    def revoke(self, name: str) -> Authority:
        """Without every certificate that this participant has so far."""
        now = datetime.now(UTC)
        gone = {one.serial: now for one in self.certificates(name) if one.serial not in self.revoked}
        if not gone:
            raise DataError(f"'{name}' has no certificate that could be revoked.")
        return replace(self, revoked={**self.revoked, **gone}, number=self.number + 1)

    @property
    def root_certificate(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.root.encode())

    @property
    def private_key(self) -> RSAPrivateKey:
        key = load_pem_private_key(self.key.encode(), password=None)
        if not isinstance(key, RSAPrivateKey):  # NVIDIA FLARE makes no others
            raise ValueError("its key is not an RSA key")
        return key

    def check(self) -> None:
        """Raises ValueError if a certificate or the key is damaged."""
        _ = self.root_certificate, self.private_key, [self.certificates(name) for name in self.issued]

    def revoked_list(self) -> bytes:
        return sign_revoked(self.revoked, self.number, self.root_certificate, self.private_key)

    def write(self, folder: Path) -> None:
        make_folder(folder, private=True)
        facts = {
            **{_ROOT: self.root, _KEY: self.key, "number": self.number},
            "issued": {name: list(pems) for name, pems in self.issued.items()},
            "revoked": {f"{serial:x}": when.isoformat() for serial, when in self.revoked.items()},
        }
        write_json(facts, folder / FILE, private=True)


def read_authority(folder: Path, names: Mapping[str, str] | None = None) -> Authority:
    """The authority in a folder; `names` are the participants of the names on certificates, where they differ."""
    path = folder / FILE
    if not path.is_file():
        raise DataError(f"{folder} is not the authority's folder; it is beside the kits that it has made (--to).")
    facts: dict[str, Any] = read_json(path, REMEDY)
    try:
        found = _told(facts, names or {})
        found.check()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); {REMEDY}.") from error
    return found


def _told(facts: Mapping[str, Any], names: Mapping[str, str]) -> Authority:
    if "issued" not in facts:  # NVIDIA FLARE's own form, with everyone's private key: kits before 0.2
        issued = {names.get(name, name): (one["cert"],) for name, one in facts.items() if isinstance(one, dict)}
        return Authority(facts[_ROOT], facts[_KEY], issued, {})
    return Authority(
        facts[_ROOT],
        facts[_KEY],
        {name: tuple(pems) for name, pems in facts["issued"].items()},
        {int(serial, 16): datetime.fromisoformat(when) for serial, when in facts["revoked"].items()},
        int(facts["number"]),
    )
