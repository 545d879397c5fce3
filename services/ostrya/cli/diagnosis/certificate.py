"""Dates and names of an X.509 certificate, from its DER bytes. Pure.

Python's ssl tells them for certificates it trusts only, and those of a cluster's own issuer, or expired ones, are the
ones to look at. RFC 5280 section 4.1; DER is X.690.
"""

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

_OID, _UTC_TIME, _EXTENSIONS = 0x06, 0x17, 0xA3
_VERSION, _DNS_NAME, _IP_ADDRESS = 0xA0, 0x82, 0x87
_SUBJECT_ALT_NAME = bytes([0x55, 0x1D, 0x11])
"""2.5.29.17"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """When it is valid, and for whom."""

    not_before_s: float
    """Unix seconds; so the next."""
    not_after_s: float
    names: tuple[str, ...]
    """DNS names and addresses. The old common name is not among them: clients ignore it."""

    def covers(self, host: str) -> bool:
        """Whether a client that dialled `host` would take it. A * stands for one leading label."""
        wanted = host.lower().rstrip(".")
        return any(name == wanted or (name[:2] == "*." and name[2:] == wanted.partition(".")[2]) for name in self.names)


def read(der: bytes) -> Certificate:
    """ValueError for what is no certificate."""
    try:
        ((_, certificate),) = _parts(der)
        signed = next(_parts(certificate))[1]
        fields = [part for part in _parts(signed) if part[0] != _VERSION]
        # serial, algorithm, issuer, validity, subject, key, extensions
        not_before, not_after = (_time(*part) for part in _parts(fields[3][1]))
        extensions = [content for tag, content in fields[6:] if tag == _EXTENSIONS]
        names = tuple(name for content in extensions for name in _names(content))
    except (IndexError, StopIteration, UnicodeDecodeError) as error:
        raise ValueError("not a certificate") from error
    return Certificate(not_before_s=not_before, not_after_s=not_after, names=names)


def _names(extensions: bytes) -> Iterator[str]:
    for _, extension in _parts(next(_parts(extensions))[1]):
        parts = list(_parts(extension))
        if parts[0] != (_OID, _SUBJECT_ALT_NAME):
            continue
        for tag, name in _parts(next(_parts(parts[-1][1]))[1]):
            if tag == _DNS_NAME:
                yield name.decode("ascii").lower()
            elif tag == _IP_ADDRESS:
                yield str(ipaddress.ip_address(name))


def _time(tag: int, text: bytes) -> float:
    digits = text.decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: 1950 to 2049
        digits = ("20" if digits < "50" else "19") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _parts(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Tags and contents, one after the other."""
    at = 0
    while at < len(content):
        tag, size, at = content[at], content[at + 1], at + 2
        if size & 0x80:
            num_bytes = size & 0x7F
            size, at = int.from_bytes(content[at : at + num_bytes]), at + num_bytes
        if at + size > len(content):
            raise ValueError("not a certificate: it is cut off")
        yield tag, content[at : at + size]
        at += size
