"""What this package itself has logged: other libraries log when they like, and more on a busy machine."""

import logging

import pytest


def ours(caplog: pytest.LogCaptureFixture, *, level: int = logging.NOTSET) -> list[logging.LogRecord]:
    """The records of our own loggers, from `level` up."""
    return [record for record in caplog.records if record.name.startswith("ostrya") and record.levelno >= level]
