"""Every error Ostrya raises on purpose; standard library only.

    OstryaError
    ├── InvalidRequest (also ValueError)   the request can never work; names field, value and allowed range
    ├── UnknownModel                       names the models that exist
    ├── NotFound                           an id that is unknown or has expired
    ├── Overloaded                         a bounded queue is full; try again after retry_after_s
    ├── Unavailable                        nobody can serve this now; try again after retry_after_s
    │   ├── NoReplica                      no replica is routable
    │   └── EngineDied                     the engine process ended while it had the request
    ├── DeadlineExceeded                   the request's own deadline passed
    ├── ModelLoadError                     weights or tokenizer cannot be used; fatal at start
    ├── ConfigError (also ValueError)      settings that cannot work; lists all of them at once
    └── StateError                         what processes share through Redis
        ├── StateUnavailable               Redis cannot be reached, or refuses; never fails a request
        ├── Unreadable                     a key holds something else than it should; skipped, never fails a request
        └── Fenced                         another process has taken this worker's identity

Messages say what, value, limit, what to do. gRPC codes for these are chosen in service/status.py and nowhere else.
"""

from collections.abc import Sequence


class OstryaError(Exception):
    """The root."""


class InvalidRequest(OstryaError, ValueError):
    """A field of a request is outside what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {value}; allowed: {allowed}")
        self.field, self.value, self.allowed = field, str(value), allowed


class UnknownModel(OstryaError):
    """The named model is not served here."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        # Messages travel in headers, which are bounded; a name may be as long as a request.
        super().__init__(f"model {name[:64]!r} is not served here; models: {', '.join(sorted(known)) or 'none'}")


class NotFound(OstryaError):
    """An id that is unknown or has expired."""


class _RetryLater(OstryaError):
    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(_RetryLater):
    """A bounded queue is full."""


class Unavailable(_RetryLater):
    """Nobody can serve this now."""


class NoReplica(Unavailable):
    """No replica is routable."""


class EngineDied(Unavailable):
    """The engine process ended while it had the request."""


class DeadlineExceeded(OstryaError):
    """The request's own deadline passed."""


class ModelLoadError(OstryaError):
    """Weights or tokenizer cannot be used."""


class ConfigError(OstryaError, ValueError):
    """Settings that cannot work; all problems at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class StateError(OstryaError):
    """What processes share through Redis."""


class StateUnavailable(StateError):
    """Redis cannot be reached, or answers and refuses."""

    def __init__(self, message: str, *, refusal: str = "") -> None:
        super().__init__(message)
        self.refusal = refusal
        """What it answered, one of state/connection.py's Refusal; empty = nothing."""


class Unreadable(StateError):
    """A key in Redis holds something else than it should."""


class Fenced(StateError):
    """Another process has taken this worker's identity."""
