"""Dates and names from DER, against certificates that `cryptography` made."""

import random
from datetime import UTC, datetime

import pytest

from ostrya.cli.diagnosis.certificate import Certificate, read
from tests.fakes.certificates import make_certificate


@pytest.mark.parametrize("year", [1999, 2049, 2050, 2999])  # UTCTime up to 2049, GeneralizedTime from then on
def test_dates_and_names_are_read(year: int) -> None:
    begin, end = datetime(1990, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(year, 12, 31, 23, 59, 58, tzinfo=UTC)
    names = ("router.example.org", "*.pool.svc", "127.0.0.1", "::1")
    found = read(make_certificate(names, not_before=begin, not_after=end).der)
    assert (found.not_before_s, found.not_after_s) == (begin.timestamp(), end.timestamp())
    assert found.names == names


def test_a_certificate_without_names_has_none() -> None:
    now = datetime.now(UTC)
    assert read(make_certificate((), not_before=now, not_after=now).der).names == ()


def test_what_is_no_certificate_is_a_value_error() -> None:
    now = datetime.now(UTC)
    der = make_certificate(("a.example",), not_before=now, not_after=now).der
    for broken in (b"", b"\x30", b"hello", der[:-1], der[:40], der[1:]):
        with pytest.raises(ValueError):  # noqa: PT011 - whatever is said, it is not an IndexError
            read(broken)
    rng = random.Random(3)
    for _ in range(300):
        mangled = bytearray(der)
        mangled[rng.randrange(len(der))] ^= 1 << rng.randrange(8)
        try:
            read(bytes(mangled))
        except ValueError:
            continue


@pytest.mark.parametrize(
    ("host", "covered"),
    [
        ("router.example.org", True),
        ("ROUTER.example.org.", True),
        ("a.pool.svc", True),
        ("a.b.pool.svc", False),
        ("pool.svc", False),
        ("10.0.0.1", True),
        ("10.0.0.2", False),
        ("example.org", False),
    ],
)
def test_a_name_covers_itself_and_a_star_one_label(host: str, covered: bool) -> None:
    names = ("router.example.org", "*.pool.svc", "10.0.0.1")
    assert Certificate(not_before_s=0, not_after_s=1, names=names).covers(host) is covered
