"""The filters, tests and methods that chat templates may use, each charged to a meter. Used by sandbox.py.

They are jinja2's and Python's own, without what no chat needs and what cannot be bounded. A result that may be larger
than what it is made of is estimated before it is made.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import BuiltinMethodType, FunctionType
from typing import TypeAlias, cast

from jinja2 import Environment, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Undefined
from jinja2.tests import TESTS
from markupsafe import escape

from ostrya.text.meter import STEP_BYTES, Meter, TooCostly

Operation: TypeAlias = Callable[..., object]

_CHAR_BYTES = 4
"""Of every character of a text that has a rare one."""

_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

_WIDTH = r"(?:\*|\d{4})"
"""A width that a value gives, or of more than three digits."""
_WIDE, _WIDE_AFTER_NAME = re.compile(f"%[^%a-zA-Z]*{_WIDTH}"), re.compile(_WIDTH)

_MAX_JSON_SPACE = 16
_MAX_DIGITS = 99
_SLOWEST_SEARCH = 100
"""Characters of a sought text that may be compared again at every place: Python switches its algorithm at so many."""

_PLAIN = ("abs", "count", "d", "default", "first", "float", "int", "last", "length")
_TEXTUAL = ("capitalize", "lower", "truncate", "upper")
_LISTING = ("list", "map", "reject", "rejectattr", "select", "selectattr")
_SORTING = ("dictsort", "max", "min", "sort", "unique")
_PLAIN_TESTS = (
    *("boolean", "callable", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number"),
    *("sameas", "sequence", "string", "true", "undefined"),
)
_INTEGER_TESTS = ("divisibleby", "even", "odd")
_TEXTUAL_TESTS = ("lower", "upper")
_COMPARING_TESTS = (
    *("in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le"),
)
_METHODS: dict[type, frozenset[str]] = {
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
_SLOW = ("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip")
"""They may compare every character of the one text with every one of the other."""
_CASES = ("capitalize", "casefold", "lower", "swapcase", "title", "upper")
_SEARCHING = ("count", "endswith", "find", "index", "partition", "removeprefix", "removesuffix", "startswith")
_ASKING = (
    *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit"),
    *("islower", "isnumeric", "isspace", "istitle", "isupper"),
)
_OF_TEXT = frozenset((*_CASES, *_ASKING, "splitlines"))


def filters(meter: Meter) -> dict[str, Operation]:
    """By name."""
    found: dict[str, Operation] = {
        "tojson": _to_json(meter),
        "items": lambda value: meter.listed(_mapping(value).items()),
        "replace": lambda text, old, new, count=-1: replaced(
            meter, meter.text(text), meter.text(old), meter.text(new), -1 if count is None else count
        ),
        "trim": lambda text, chars=None: stripped(meter, meter.text(text), chars),
        "format": lambda form, *values, **named: formatted(meter, meter.text(form), values or named),
        "indent": _indent(meter),
        "join": _join(meter),
        "reverse": lambda value: meter.made(value[::-1]) if isinstance(value, str) else meter.listed(reversed(value)),
        "round": _round(meter),
    }
    found |= dict.fromkeys(("safe", "string"), meter.text)
    found |= dict.fromkeys(("e", "escape"), lambda value: meter.made(str(escape(_roomy(meter, meter.text(value), 6)))))
    for name in _PLAIN:
        found[name] = _wrapped(FILTERS[name], after=meter.made)
    for name in _TEXTUAL:
        found[name] = _wrapped(FILTERS[name], before=lambda value: _roomy(meter, meter.text(value)), after=meter.made)
    # Works word by word.
    found["title"] = _wrapped(
        FILTERS["title"], before=lambda value: _roomy(meter, meter.text(value), 16), after=meter.made
    )
    for name in _LISTING:
        found[name] = _listing(meter, FILTERS[name])
    for name in _SORTING:
        found[name] = _sorting(meter, FILTERS[name])
    for name, function in found.items():
        if isinstance(function, FunctionType):
            function.__qualname__ = name  # which errors about its arguments tell
    return found


def tests(meter: Meter) -> dict[str, Operation]:
    """By name."""
    own = cast("Mapping[str, Operation]", TESTS)
    found: dict[str, Operation] = {name: own[name] for name in _PLAIN_TESTS}
    for name in _INTEGER_TESTS:
        found[name] = _wrapped(own[name], before=_integer)
    for name in _TEXTUAL_TESTS:
        found[name] = _wrapped(own[name], before=meter.text)
    for name in _COMPARING_TESTS:
        found[name] = _weighing(meter, own[name])
    return found


def call_method(
    meter: Meter, method: BuiltinMethodType, args: tuple[object, ...], named: Mapping[str, object]
) -> object:
    """A method of a value. SecurityError if templates may not call it."""
    owner, name = method.__self__, method.__name__
    if isinstance(owner, str):
        return _text_method(meter, owner, method, [*args, *named.values()])
    kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
    if kind is None or name not in _METHODS[kind]:
        raise SecurityError(f"{type(owner).__name__}.{name} cannot be called in a chat template")
    for value in (owner, *args) if name in ("count", "index") else args[:1]:
        meter.weighed(value)
    return meter.made(method(*args, **named))


def formatted(meter: Meter, form: str, values: object) -> str:
    """`form % values`."""
    if _WIDE.search(form) or ("%(" in form and _WIDE_AFTER_NAME.search(form)):
        raise TooCostly("a % format has a width of more than three digits")
    meter.reserve(len(form) + form.count("%") * (1000 + meter.text_bound(values)))
    return meter.made(form % values)


def replaced(meter: Meter, text: str, old: str, new: str, count: int = -1) -> str:
    """`text.replace(old, new, count)`."""
    _search(meter, text, old)
    num = text.count(old) if count < 0 else min(text.count(old), count)
    meter.reserve(_CHAR_BYTES * (len(text) + num * len(new)))
    return meter.made(text.replace(old, new, count))


def stripped(meter: Meter, text: str, chars: str | None) -> str:
    """`text.strip(chars)`."""
    _search(meter, text, chars, slowest=len(text))
    return meter.made(text.strip(chars))


def joined(meter: Meter, between: str, texts: list[str]) -> str:
    """`between.join(texts)`."""
    meter.reserve(_CHAR_BYTES * (len(between) * len(texts) + sum(map(len, texts))))
    return meter.made(between.join(texts))


def _text_method(meter: Meter, text: str, method: BuiltinMethodType, given: list[object]) -> object:
    name = method.__name__
    first = given[0] if given else None
    meter.charge(len(text) // 8)
    if name == "join":
        return joined(meter, text, meter.listed(cast("Iterable[str]", first)))
    if name == "replace":
        return replaced(meter, text, *given)  # type: ignore[arg-type]
    if name in ("split", "rsplit"):
        return _split(meter, text, method, given)
    if name in ("partition", "rpartition", "splitlines"):
        _room_for_parts(meter, text, sum(map(text.count, _LINE_ENDS)) if name == "splitlines" else 3)
    if name in _SLOW:
        _search(meter, text, first, slowest=len(text))
    elif name in _SEARCHING:
        _search(meter, text, first)
    elif name not in _OF_TEXT:
        raise SecurityError(f"str.{name} cannot be called in a chat template")
    return meter.made(method(*given))


def _split(meter: Meter, text: str, method: BuiltinMethodType, given: list[object]) -> object:
    """str.split and str.rsplit."""
    separator, limit = (*given, None, None)[:2]
    if isinstance(separator, int):  # split(maxsplit=1)
        separator, limit = None, separator
    if isinstance(separator, str) and separator:
        _search(meter, text, separator, slowest=len(text) if method.__name__ == "rsplit" else _SLOWEST_SEARCH)
        num_parts = text.count(separator)
    else:
        num_parts = len(text) // 2
    if isinstance(limit, int) and limit >= 0:
        num_parts = min(num_parts, limit)
    _room_for_parts(meter, text, num_parts)
    return method(separator, -1 if limit is None else limit)


def _room_for_parts(meter: Meter, text: str, num_parts: int) -> None:
    meter.charge(text.__sizeof__() + num_parts * STEP_BYTES)


def _search(meter: Meter, text: str, sought: object, *, slowest: int = _SLOWEST_SEARCH) -> None:
    """From the left Python's search is nearly linear, from the right it is not."""
    meter.weighed(sought)
    meter.charge(len(text) * min(len(sought) if isinstance(sought, str) else 1, slowest) // 16)


def _roomy(meter: Meter, text: str, factor: int = 1) -> str:
    meter.reserve(factor * _CHAR_BYTES * len(text))
    return text


def _integer(value: object) -> object:
    """The test's own operator is %, which formats a text."""
    if not isinstance(value, int):
        raise TypeError(f"a {type(value).__name__} is no integer")
    return value


def _mapping(value: object) -> Mapping[object, object]:
    if isinstance(value, Undefined):
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} has no items")
    return value


def _place(function: Operation) -> int:
    """Of the value among the arguments: jinja2 gives some functions its context first."""
    return 1 if hasattr(function, "jinja_pass_arg") else 0


def _wrapped(
    function: Operation,
    *,
    before: Callable[[object], object] = lambda value: value,
    after: Callable[[object], object] = lambda value: value,
) -> Operation:
    place = _place(function)

    @wraps(function)
    def wrapped(*args: object, **named: object) -> object:
        return after(function(*args[:place], before(args[place]), *args[place + 1 :], **named))

    return wrapped


def _weighing(meter: Meter, function: Operation) -> Operation:
    def weighing(*args: object) -> object:
        return function(*map(meter.weighed, args))

    return weighing


def _listing(meter: Meter, function: Operation) -> Operation:
    """Of a lazy filter an eager one."""
    place = _place(function)

    @wraps(function)
    def listing(*args: object, **named: object) -> object:
        values = meter.ticking(
            cast("Iterable[object]", args[place]), num_bytes=_weight(meter, args[place + 1 :], named)
        )
        return meter.listed(cast("Iterable[object]", function(*args[:place], values, *args[place + 1 :], **named)))

    return listing


def _sorting(meter: Meter, function: Operation) -> Operation:
    """Of a filter that compares or hashes the values, each some twenty times."""
    place = _place(function)

    @wraps(function)
    def sorting(*args: object, **named: object) -> object:
        values, num_bytes = args[place], 8 * STEP_BYTES + _weight(meter, args[place + 1 :], named)
        if not isinstance(values, dict):
            values = meter.listed(cast("Iterable[object]", values))
        meter.charge(num_bytes * len(meter.weighed(values)))
        found = function(*args[:place], values, *args[place + 1 :], **named)
        return meter.listed(cast("Iterable[object]", found)) if hasattr(found, "__next__") else meter.made(found)

    return sorting


def _weight(meter: Meter, args: tuple[object, ...], named: Mapping[str, object]) -> int:
    """Of arguments that are looked up for every value: an attribute's name may be of many attributes."""
    given = [meter.weighed(one) for one in (*args, *named.values())]
    return sum(len(one) + STEP_BYTES * one.count(".") for one in given if isinstance(one, str))


def _to_json(meter: Meter) -> Operation:
    """As transformers has it: not jinja2's own, which is for HTML."""

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        space = indent if isinstance(indent, int) else len(indent or "")
        if max(space, *map(len, separators or ("", ""))) > _MAX_JSON_SPACE:
            raise TooCostly(f"tojson indents or separates by more than {_MAX_JSON_SPACE} characters")
        # A value is at least STEP_BYTES long here: so many lines, indented by its depth.
        meter.reserve(meter.text_bound(value) * (1 + space))
        return meter.made(
            json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        )

    return to_json


def _indent(meter: Meter) -> Operation:
    def indent(value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> object:
        text = meter.text(value)
        lines = 2 + sum(map(text.count, _LINE_ENDS))
        meter.reserve(
            _CHAR_BYTES * (len(text) + lines * (STEP_BYTES + (len(width) if isinstance(width, str) else width)))
        )
        return meter.made(FILTERS["indent"](text, width, first, blank))

    return indent


def _join(meter: Meter) -> Operation:
    @pass_environment
    def join(
        environment: Environment, values: Iterable[object], between: object = "", attribute: str | int | None = None
    ) -> str:
        if attribute is not None:
            values = meter.ticking(values, num_bytes=_weight(meter, (attribute,), {}))
            values = map(make_attrgetter(environment, attribute), values)
        return joined(meter, meter.text(between), [meter.text(value) for value in values])

    return join


def _round(meter: Meter) -> Operation:
    def round_to(value: object, precision: int = 0, method: str = "common") -> object:
        if not isinstance(value, int | float) or not isinstance(method, str):
            raise TypeError("round takes a number, and a method by its name")
        if abs(precision) > _MAX_DIGITS:
            raise TooCostly(f"round to {precision} digits; chat templates may have {_MAX_DIGITS}")
        return meter.made(FILTERS["round"](value, precision, method))

    return round_to
