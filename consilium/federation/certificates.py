"""What certificates say, which of them the authority has revoked, and when they end.

Nothing here imports NVIDIA FLARE: a supervisor reads its own certificate with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.x509.oid import NameOID

from consilium.errors import DataError
from consilium.wording import counted

AHEAD = timedelta(days=30)  # an end that is nearer is warned of
EVER = datetime.min.replace(tzinfo=UTC)
REVOKED = "revoked.pem"  # the authority's list, in a kit
ROOT = Path("startup", "rootCA.pem")


@dataclass(frozen=True)
class Certificate:
    """A certificate as its holder shows it."""

    name: str  # the participant's
    role: str  # of an administrator, in NVIDIA FLARE's word; else empty
    serial: int
    expires: datetime
    begins: datetime = EVER

    @property
    def days(self) -> int:
        """Whole days until its end; negative once it is over."""
        return (self.expires - datetime.now(UTC)).days

    @property
    def holds(self) -> bool:
        """Whether it is valid now, by this machine's clock."""
        return self.begins <= datetime.now(UTC) <= self.expires

    def validity(self) -> str:
        """Until when it is valid, in a few words."""
        if datetime.now(UTC) < self.begins:
            return f"valid from {self.begins:%Y-%m-%d}"
        on = f"{self.expires:%Y-%m-%d}"
        if self.days < 0:
            return f"expired on {on}"
        return f"valid until {on}{' (soon)' if self.warning() else ''}"

    def warning(self) -> str:
        """A sentence if it does not hold by this machine's clock, or its end is near; else empty."""
        now = datetime.now(UTC)
        if now < self.begins:
            return (
                f"the certificate of '{self.name}' is valid from {self.begins:%Y-%m-%d %H:%M} UTC, and this machine's "
                f"clock says {now:%Y-%m-%d %H:%M} UTC; set the clock."
            )
        if self.expires - now > AHEAD:
            return ""
        on = f"{self.expires:%Y-%m-%d}"
        expired = f"expired on {on} (this machine's clock says {now:%Y-%m-%d})"
        when = expired if self.days < 0 else f"expires on {on}, in {counted(self.days, 'day')}"
        return (
            f"the certificate of '{self.name}' {when}; the consortium renews it with `consilium federation kits renew`."
        )


def shown(pem: bytes) -> Certificate:
    """Raises ValueError if it is no certificate."""
    found = x509.load_pem_x509_certificate(pem)

    def said(what: x509.ObjectIdentifier) -> str:
        parts = found.subject.get_attributes_for_oid(what)
        return str(parts[0].value) if parts else ""

    name, role = said(NameOID.COMMON_NAME), said(NameOID.UNSTRUCTURED_NAME)
    return Certificate(name, role, found.serial_number, found.not_valid_after_utc, found.not_valid_before_utc)


def certificate_of(kit: Path) -> Certificate:
    """The kit's own."""
    path = _own(kit)
    try:
        return shown(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is no certificate: {error}; ask the consortium for a new kit.") from error


def _own(kit: Path) -> Path:
    for name in ("client.crt", "server.crt"):
        path = kit / "startup" / name
        if path.is_file():
            return path
    raise DataError(f"{kit} has no certificate in `startup`; ask the consortium for a new kit.")


def require_one_kit(kit: Path, user: str = "") -> None:
    """Refuse a kit put together from parts of several, which would try to connect for ever; `user` is its owner."""
    found = certificate_of(kit)
    path = _own(kit)
    remedy = "copy the whole `startup` folder of the kit that the consortium made or renewed"
    if user and found.name != user:
        raise DataError(f"{path} is of '{found.name}', but the kit is of '{user}'; {remedy}.")
    own = x509.load_pem_x509_certificate(path.read_bytes())
    try:
        key = serialization.load_pem_private_key(path.with_suffix(".key").read_bytes(), None)
        root = x509.load_pem_x509_certificate((kit / ROOT).read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path.parent} has no key or no authority that can be read ({error}); {remedy}.") from error
    if key.public_key() != own.public_key():
        raise DataError(f"{path.with_suffix('.key')} does not belong to {path.name}; {remedy}.")
    try:
        own.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise DataError(f"{path} is not by the authority of {ROOT.name} beside it; {remedy}.") from error


def sign_revoked(serials: Mapping[int, datetime], number: int, root: x509.Certificate, key: RSAPrivateKey) -> bytes:
    """The list of revoked certificates as others read it too (X.509 CRL); a later list has a higher number."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(root.subject)
        .last_update(datetime.now(UTC))
        .next_update(root.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial, when in sorted(serials.items()):
        one = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when).build()
        builder = builder.add_revoked_certificate(one)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True)
class Revoked:
    """A list that the authority has signed."""

    number: int = 0
    serials: frozenset[int] = frozenset()


def read_revoked(kit: Path) -> Revoked:
    """The list in a kit; empty if there is none. Raises DataError if it is not of the kit's own authority."""
    path = kit / REVOKED
    try:
        pem = path.read_bytes()
    except FileNotFoundError:
        return Revoked()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; restore the consortium's list.") from error
    try:
        found = x509.load_pem_x509_crl(pem)
        key = x509.load_pem_x509_certificate((kit / ROOT).read_bytes()).public_key()
        if not isinstance(key, RSAPublicKey) or not found.is_signature_valid(key):
            raise ValueError("the consortium's authority has not signed it")
        number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except (ValueError, OSError, x509.ExtensionNotFound) as error:
        raise DataError(f"{path} is no list of revoked certificates: {error}; restore the consortium's.") from error
    return Revoked(number, frozenset(one.serial_number for one in found))
