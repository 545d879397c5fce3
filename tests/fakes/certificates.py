"""Certificates for tests, self-signed, and a TLS socket that shows one."""

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


@dataclass(frozen=True, slots=True)
class Made:
    """A certificate and its key."""

    der: bytes
    pem: bytes
    key_pem: bytes


def make_certificate(names: Sequence[str], *, not_before: datetime, not_after: datetime) -> Made:
    """For these DNS names and addresses."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ostrya test")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(not_after)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
    made = builder.sign(key, hashes.SHA256())
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Made(made.public_bytes(Encoding.DER), made.public_bytes(Encoding.PEM), key_pem)


@asynccontextmanager
async def tls_endpoint(made: Made, directory: Path) -> AsyncIterator[str]:
    """127.0.0.1:port where a TLS server shows the certificate."""
    (directory / "certificate.pem").write_bytes(made.pem)
    (directory / "key.pem").write_bytes(made.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "certificate.pem", directory / "key.pem")
    async with await asyncio.start_server(_hang_up, "127.0.0.1", 0, ssl=context) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
