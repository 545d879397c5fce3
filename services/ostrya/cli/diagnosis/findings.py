"""What `ostrya doctor` says: one finding a thing looked at."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How bad it is, worst first."""

    FAIL = "fail"
    WARN = "warn"
    OK = "ok"
    SKIPPED = "skipped"
    """Not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence, and where something is wrong another that says what to do."""

    check: str
    status: Status
    sentence: str
    advice: str = ""


def ok(check: str, sentence: str) -> Finding:
    return Finding(check=check, status=Status.OK, sentence=sentence)


def warn(check: str, sentence: str, advice: str) -> Finding:
    return Finding(check=check, status=Status.WARN, sentence=sentence, advice=advice)


def fail(check: str, sentence: str, advice: str) -> Finding:
    return Finding(check=check, status=Status.FAIL, sentence=sentence, advice=advice)


def skipped(check: str, sentence: str) -> Finding:
    return Finding(check=check, status=Status.SKIPPED, sentence=sentence)


def listed(names: Iterable[str], *, most: int = 5) -> str:
    """`a, b and c`; of many the first and how many more."""
    found = sorted(names)
    if len(found) > most:
        return f"{', '.join(found[:most])} and {len(found) - most} more"
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def counted(number: int, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
