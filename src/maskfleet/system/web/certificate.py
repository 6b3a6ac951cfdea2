"""Certificates for servers of this machine: given files, or a self-signed one that is made once."""

from __future__ import annotations

import hashlib
import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from maskfleet.errors import MaskfleetError
from maskfleet.system.files import write_atomically

VALID_DAYS = 365
RENEW_DAYS = 30  # a self-signed certificate that expires earlier is replaced


@dataclass(frozen=True, slots=True)
class Certificate:
    """The PEM files of a certificate (with its chain) and of its private key."""

    chain: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        """TLS 1.2 or newer with this certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # An empty password, because OpenSSL would ask the terminal for that of an encrypted key.
            context.load_cert_chain(self.chain, self.key, password="")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise MaskfleetError(
                f"{self.chain} and {self.key} are no certificate and key that can be used: {error}",
                remedy="give PEM files that belong together, the key without a passphrase",
            ) from error
        return context

    def fingerprint(self) -> str:
        """SHA-256 of the certificate in the form that browsers show."""
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.chain.read_text(encoding="ascii"))).hexdigest().upper()
        return ":".join(digest[start : start + 2] for start in range(0, len(digest), 2))


def self_signed(folder: Path, host: str) -> Certificate:
    """A certificate for `host`, a name or an address, kept in `folder` so that a browser's exception stays valid."""
    # Not "name.crt" with the host in it: a host may hold any character.
    name = hashlib.sha256(host.encode()).hexdigest()[:16]
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    if not _is_usable(made):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        chain, key = _new_pair(host)
        write_atomically(made.key, key, private=True)
        write_atomically(made.chain, chain)
    return made


def _is_usable(made: Certificate) -> bool:
    from cryptography import x509

    try:
        loaded = x509.load_pem_x509_certificate(made.chain.read_bytes())
        made.server_context()
    except (OSError, ValueError, MaskfleetError):
        return False
    return loaded.not_valid_after_utc > datetime.now(UTC) + timedelta(days=RENEW_DAYS)


def _new_pair(host: str) -> tuple[bytes, bytes]:
    """A certificate and its key as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "maskfleet")])
    try:
        subject: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        subject = x509.DNSName(host)
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=VALID_DAYS))
    builder = builder.add_extension(x509.SubjectAlternativeName([subject]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    signed = builder.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return signed.public_bytes(pem), private
