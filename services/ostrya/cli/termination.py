"""SIGTERM before anybody handles it: the first process of a container ignores it unless it asks for it."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the process at once, without cleaning up, until an event loop takes it over or the block ends."""
    with _replaced(signal.SIGTERM):
        yield


@contextmanager
def ends_at_once() -> Iterator[None]:
    """The same for Ctrl-C too, where threads would be waited for."""
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.enter_context(_replaced(number))
        yield


@contextmanager
def _replaced(number: signal.Signals) -> Iterator[None]:
    before = signal.signal(number, lambda received, frame: os._exit(128 + received))
    try:
        yield
    finally:
        signal.signal(number, before)
