"""Words of `ostrya capacity`'s options as values. Each function raises ConfigError: what, value, what is allowed."""

import math
import re
from enum import Enum
from pathlib import Path
from typing import TypeVar

from ostrya.errors import ConfigError

E = TypeVar("E", bound=Enum)

MAX_TOKENS = 10**9
"""More than any model's context; beyond is a typing error."""
MAX_RATE_PER_S = 1e6
MIN_RATE_PER_S = 1 / 3600
MAX_PRICE = 1e6
MIN_PRICE = 1e-3
MAX_SECONDS = 3600.0
MIN_SECONDS = 1e-6
_TIME = re.compile(r"([0-9.eE+-]+) ?(us|µs|ms|s)", re.ASCII)
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE = re.compile(r"([0-9.eE+-]+)(?:/(s|min|h))?", re.ASCII)
_PER_SECOND = {"s": 1, "min": 60, "h": 3600}
PLOT_SUFFIXES = (".svg", ".png")


def whole(option: str, text: str, *, least: int = 1, most: int = MAX_TOKENS) -> int:
    """A count; 8192, 8_192 and 8,192 are the same."""
    digits = text.replace(",", "").replace("_", "")
    # int() takes other scripts' digits, and thousands of them.
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18 and least <= int(digits) <= most):
        raise ConfigError([f"{option} is {_short(text)}; it must be a whole number from {least:,} to {most:,}"])
    return int(digits)


def ratio(option: str, text: str) -> float:
    """0 to 1."""
    value = _number(text)
    if value is None or not 0 <= value <= 1:
        raise ConfigError([f"{option} is {_short(text)}; it must be a number from 0 to 1"])
    return value


def rates(option: str, text: str) -> tuple[float, ...]:
    """Shares of rounds in which each drafted position is accepted, as 0.86,0.71,0.59."""
    return tuple(ratio(option, word.strip()) for word in text.split(","))


def length(option: str, text: str) -> float:
    """An acceptance length."""
    value = _number(text)
    if value is None or value < 1:
        raise ConfigError([f"{option} is {_short(text)}; it must be a number of at least 1, tokens per round"])
    return value


def choice(option: str, text: str, kinds: type[E]) -> E:
    """One of an enum's values."""
    for kind in kinds:
        if kind.value == text:
            return kind
    raise ConfigError([f"{option} is {_short(text)}; it must be one of {', '.join(str(kind.value) for kind in kinds)}"])


def objective(option: str, text: str) -> dict[str, float]:
    """ttft=1s,tpot=20ms in seconds, by name."""
    found: dict[str, float] = {}
    for word in text.split(","):
        name, _, value = (piece.strip() for piece in word.partition("="))
        match = _TIME.fullmatch(value)
        number = _number(match[1]) if match else None
        if name not in ("ttft", "tpot") or match is None or number is None:
            raise ConfigError([f"{option} has {_short(word)}; it must be like ttft=1s,tpot=20ms (units s, ms, us)"])
        if name in found:
            raise ConfigError([f"{option} names {name} twice; once is enough"])
        seconds = number * _SECONDS[match[2]]
        if not MIN_SECONDS <= seconds <= MAX_SECONDS:
            raise ConfigError([f"{option} has {_short(word)}; {name} must be from 1us to {MAX_SECONDS:g}s"])
        found[name] = seconds
    return found


def rate_per_s(option: str, text: str) -> float:
    """5/s, 300/min, 1000/h, or 5."""
    match = _RATE.fullmatch(text.strip())
    number = _number(match[1]) if match else None
    if match is None or number is None:
        raise ConfigError([f"{option} is {_short(text)}; it must be like 5/s, 300/min or 1000/h"])
    per_s = number / _PER_SECOND[match[2] or "s"]
    if not MIN_RATE_PER_S <= per_s <= MAX_RATE_PER_S:
        raise ConfigError([f"{option} is {_short(text)}; it must be from 1/h to {MAX_RATE_PER_S:,.0f}/s"])
    return per_s


def prices(option: str, text: str, generations: tuple[str, ...]) -> dict[str, float]:
    """v6e=1.2,tpu7x=5 per chip-hour, by generation."""
    found: dict[str, float] = {}
    for word in text.split(","):
        name, _, value = (piece.strip() for piece in word.partition("="))
        price = _number(value)
        if name not in generations or price is None:
            known = ", ".join(generations)
            raise ConfigError([f"{option} has {_short(word)}; it must be like v6e=1.2,tpu7x=5, of {known}"])
        if name in found:
            raise ConfigError([f"{option} names {name} twice; once is enough"])
        if not MIN_PRICE <= price <= MAX_PRICE:
            raise ConfigError([f"{option} has {_short(word)}; a price must be from {MIN_PRICE:g} to {MAX_PRICE:,.0f}"])
        found[name] = price
    return found


def existing(option: str, text: str) -> Path:
    """A plain file: a device or a pipe may never end."""
    path = Path(text)
    if not path.is_file():
        raise ConfigError([f"{option} is {_short(text)}, which is not a file"])
    return path


def picture(option: str, text: str) -> Path:
    """A file that can be written, of a kind that can be drawn."""
    path = Path(text)
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError([f"{option} is {_short(text)}; it must end in {' or '.join(PLOT_SUFFIXES)}"])
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError([f"{option} is {_short(text)}; its folder must exist, and it must not be one"])
    return path


def _number(text: str) -> float | None:
    """A finite number, else None. float() alone takes nan, inf, other scripts and underscores."""
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _short(text: str) -> str:
    return repr(text if len(text) <= 64 else text[:64] + "…")
