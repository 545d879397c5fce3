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

MAX_LOGIT_BIAS = 1_024
"""As many as stop tokens; what is more is a vocabulary of its own."""

MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 256
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
"""A word is two: with a space before it and without."""
MAX_BAD_SEQUENCE_TOKENS = 2 * MAX_BAD_WORD_BYTES
"""A token has a byte at least; a tokenizer may put some of its own around a word."""

MAX_GRAMMAR_BYTES = 65_536
"""Of a schema, an expression, a grammar, or all the texts to choose from; half of it compiled in 0.2 s."""
MAX_GRAMMAR_CHOICES = 1_024

MAX_TOP_LOGPROBS = 20
"""What OpenAI's API takes; each costs eight bytes a token on the wire."""

MAX_PROMPT_LOGPROBS = 131_072
"""Numbers, which come in one message: about a megabyte, where many gRPC clients take four."""

MAX_CHOICES = 16
"""Each is a stream and a place in a worker's step."""

MAX_PRIORITY = 100
"""Either way: enough levels for any policy, and a number that fits in a column."""

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


def check_priority(priority: int) -> None:
    """InvalidRequest unless it is from -MAX_PRIORITY to MAX_PRIORITY."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest("priority", priority, f"{-MAX_PRIORITY} to {MAX_PRIORITY}")


def check_drain_s(timeout_s: float) -> None:
    """InvalidRequest if a drain cannot take that long; false for NaN too."""
    if not 0 <= timeout_s <= MAX_DRAIN_S:
        raise InvalidRequest("timeout_s", f"{timeout_s:.9g}", f"0 to {MAX_DRAIN_S:g} seconds")
