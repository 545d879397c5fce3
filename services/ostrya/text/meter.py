"""What one rendering of a chat template may cost, and what its values do cost. Used by sandbox.py and operations.py."""

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from jinja2 import TemplateRuntimeError
from jinja2.runtime import Undefined

T = TypeVar("T")

STEP_BYTES = 64
"""What anything costs at least: about a small object."""

MAX_BITS = 1 << 14
"""Of an integer; Python writes no more than 4,300 digits anyway."""

MAX_DEPTH = 64
"""Of values in values. C code that hashes a tuple has no limit of its own, but a stack."""

_STEPS_PER_LOOK = 64
"""The clock is a system call: a microsecond."""

_MANY = 1 << 16

_EMPTY: dict[str, str] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
"""Of a dict. They have no types of their own names."""


class TooCostly(TemplateRuntimeError):
    """A rendering wants more than its budget."""


class _Left(threading.local):
    num_bytes = 0
    until = 0.0
    num_steps = 0


class Meter:
    """Budgets, one for each thread that renders."""

    def __init__(self) -> None:
        self._left = _Left()

    def start(self, *, num_bytes: int, cpu_s: float) -> None:
        """A new budget for this thread."""
        self._left.num_bytes, self._left.until = num_bytes, time.thread_time() + cpu_s

    def reserve(self, num_bytes: int) -> None:
        """TooCostly if so much is not left. Asked before something is made that may be larger than its parts."""
        if num_bytes > self._left.num_bytes:
            raise TooCostly("it makes more text than a chat of this size may need")

    def charge(self, num_bytes: int = 0) -> None:
        """One step, which made so much. Nothing is given back, so this bounds what lives at once too."""
        left = self._left
        left.num_bytes -= num_bytes + STEP_BYTES
        if left.num_bytes < 0:
            raise TooCostly("it takes more steps, or makes more text, than a chat of this size may need")
        left.num_steps += 1
        if not left.num_steps % _STEPS_PER_LOOK and time.thread_time() > left.until:
            raise TooCostly("it takes more time than a chat of this size may need")

    def made(self, value: T) -> T:
        """Charges a new value: its own size, not of what it holds."""
        if isinstance(value, int):
            check_bits(value.bit_length())
        self.charge(value.__sizeof__())
        return value

    def weighed(self, value: T) -> T:
        """Charges a value that is about to be compared or hashed, with all it holds."""
        if isinstance(value, str):
            self.charge(len(value) // 8)
        elif isinstance(value, range):
            self.charge(8 * len(value))
        elif isinstance(value, (list, tuple, dict, *_VIEWS)):
            self.charge(self.text_bound(value) // 8)
        return value

    def ticking(self, values: Iterable[T], *, num_bytes: int = 0) -> Iterator[T]:
        """The values, each charged."""
        for value in values:
            self.charge(num_bytes)
            yield value

    def listed(self, values: Iterable[T]) -> list[T]:
        """The values as a list, charged. jinja2's own filters are lazy, and then run where nothing is counted."""
        return list(self.ticking(values))

    def printed(self, value: object) -> str | int | float | Undefined | None:
        """A value on its way into a text, charged, as what `str` is small for. TypeError if it is not one to print."""
        if isinstance(value, str):
            self.charge(value.__sizeof__())
            return value
        if value is None or isinstance(value, int | float | Undefined):
            self.charge()
            return value
        self.reserve(self.text_bound(value))
        return self.made(str(value))

    def text(self, value: object) -> str:
        """`str(value)`, charged."""
        return str(self.printed(value))

    def text_bound(self, value: object) -> int:
        """At least as many bytes as a value takes when it is written out, however often it holds the same; charged.

        TypeError if it holds what has no text of its own, TooCostly if it is nested too deep.
        """
        num_bytes = 0
        level: list[object] = [value]
        for _ in range(MAX_DEPTH):
            below: list[object] = []
            for one in level:
                num_bytes += STEP_BYTES
                if isinstance(one, str):
                    num_bytes += 12 * len(one)  # every character escaped
                elif isinstance(one, dict):
                    below += one.keys()
                    below += one.values()
                elif isinstance(one, (list, tuple, *_VIEWS)):
                    below += one
                elif isinstance(one, int):
                    num_bytes += one.bit_length()
                elif not (one is None or isinstance(one, float | Undefined)):
                    raise TypeError(f"a {type(one).__name__} has no text")
                if len(below) > _MANY:
                    self.reserve(len(below) * STEP_BYTES)
            if not below:
                return num_bytes
            self.charge(len(below) * STEP_BYTES)
            level = below
        raise TooCostly(f"its values are nested more than {MAX_DEPTH} deep")


def check_bits(num_bits: int) -> None:
    """TooCostly for an integer that long."""
    if num_bits > MAX_BITS:
        raise TooCostly(f"an integer of {num_bits} bits; chat templates may have {MAX_BITS}")
