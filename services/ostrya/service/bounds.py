"""How large the fields of a request may be, for router and worker alike: a worker does not trust its router.

Every string, bytes and repeated field of every request has a bound, here or (a prompt's size) in router/settings.py;
tests/integration/test_field_bounds.py walks them. docs/operations.md lists them for users.
"""

from collections.abc import Sized

from ostrya.errors import InvalidRequest

MAX_NAME_CHARS = 256
"""Of ids and names that only need to be told apart."""

MAX_STOP_TOKEN_IDS = 1_024
"""A vocabulary has some hundred tokens that anybody would stop at."""

MAX_DRAIN_S = 86_400.0
"""A day; also keeps the sum with a margin inside what a gRPC deadline can say."""

ENDLESS_S = 365 * 86_400.0
"""A longer deadline is none; gRPC would take one of centuries, sent on, for one that has passed."""


def check_name(field: str, value: str) -> None:
    """InvalidRequest if `value` is longer than an id or a name may be."""
    if len(value) > MAX_NAME_CHARS:
        raise InvalidRequest(field, f"{len(value)} characters long", f"at most {MAX_NAME_CHARS} characters")


def check_number(field: str, values: Sized, limit: int, what: str) -> None:
    """InvalidRequest if there are more than `limit` of them; costs the same however many."""
    if len(values) > limit:
        raise InvalidRequest(field, f"{len(values)} {what}", f"at most {limit} {what}")


def check_drain_s(timeout_s: float) -> None:
    """InvalidRequest if a drain cannot take that long; false for NaN too."""
    if not 0 <= timeout_s <= MAX_DRAIN_S:
        raise InvalidRequest("timeout_s", f"{timeout_s:.9g}", f"0 to {MAX_DRAIN_S:g} seconds")
