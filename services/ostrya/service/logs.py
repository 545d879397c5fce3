"""Structured logs: one JSON object a line on stderr.

Callers pass data in extra={"fields": {...}}; never prompt text or token ids.
"""

import logging
import sys
import time

import msgspec


class JsonFormatter(logging.Formatter):
    """time (UTC, ISO 8601), level, service, logger, message, then the fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def setup(service: str, level: str) -> None:
    """Sends every logger to stderr as JSON lines. Call once, at the start of a process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
