"""What Grafana does with a dashboard, as far as plot.py and the tests need it: variables, then queries to Prometheus.

Reads the JSON in dashboards/, so what is seen here is what Grafana is given.
"""

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import msgspec

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_LABEL_VALUES = re.compile(r"label_values\((.*), *(\w+)\)")
_TIMEOUT_S = 30.0


class Grid(msgspec.Struct, frozen=True):
    """A place on the dashboard, in units of its grid."""

    x: int
    y: int
    w: int
    h: int


class Target(msgspec.Struct, frozen=True, rename="camel"):
    """One query."""

    expr: str
    legend_format: str
    instant: bool


class Mapping(msgspec.Struct, frozen=True):
    """Words and colours for values."""

    options: dict[str, dict[str, str | int]]


class Step(msgspec.Struct, frozen=True):
    """A threshold; the first has no value."""

    color: str
    value: float | None


class Thresholds(msgspec.Struct, frozen=True):
    """From the lowest."""

    steps: list[Step]


class Defaults(msgspec.Struct, frozen=True):
    """How a panel's values are shown."""

    unit: str
    thresholds: Thresholds
    custom: dict[str, object]
    mappings: list[Mapping] = []
    min: float | None = None
    max: float | None = None
    decimals: int | None = None


class Matcher(msgspec.Struct, frozen=True):
    """Which series an override is for, by legend."""

    options: str


class Color(msgspec.Struct, frozen=True, rename="camel"):
    """One that is given."""

    fixed_color: str


class Property(msgspec.Struct, frozen=True):
    """Of these series."""

    value: Color


class Override(msgspec.Struct, frozen=True):
    """What differs for some series."""

    matcher: Matcher
    properties: list[Property]


class FieldConfig(msgspec.Struct, frozen=True):
    """How values are shown, and the exceptions."""

    defaults: Defaults
    overrides: list[Override]

    @property
    def colors(self) -> dict[str, str]:
        """By legend."""
        return {one.matcher.options: one.properties[0].value.fixed_color for one in self.overrides}


class Transformation(msgspec.Struct, frozen=True):
    """Of a table: rows and columns from labels."""

    id: str
    options: dict[str, str]


class Panel(msgspec.Struct, frozen=True, rename="camel"):
    """One panel, or a row's headline (type row)."""

    id: int
    type: str
    title: str
    grid_pos: Grid
    description: str = ""
    targets: list[Target] = []
    field_config: FieldConfig | None = None
    transformations: list[Transformation] = []


class Variable(msgspec.Struct, frozen=True, rename="camel"):
    """A drop-down."""

    name: str
    type: str
    all_value: str = ""
    definition: str = ""


class Templating(msgspec.Struct, frozen=True):
    """The drop-downs in their order."""

    list: list[Variable]


class Dashboard(msgspec.Struct, frozen=True):
    """A file in dashboards/."""

    uid: str
    title: str
    templating: Templating
    panels: list[Panel]


class Series(msgspec.Struct, frozen=True):
    """What Prometheus answers: labels and samples."""

    metric: dict[str, str]
    values: list[tuple[float, str]] = []
    value: tuple[float, str] | None = None

    @property
    def samples(self) -> list[tuple[float, float]]:
        """Time and value; NaN where there is nothing to divide."""
        return [(at, float(text)) for at, text in (self.values or filter(None, [self.value]))]


class _Data(msgspec.Struct, frozen=True):
    result: list[Series]


class _Answer(msgspec.Struct, frozen=True):
    data: _Data


class _Labels(msgspec.Struct, frozen=True):
    data: list[str]


def load(path: Path) -> Dashboard:
    """A dashboard from its file."""
    return msgspec.json.decode(path.read_bytes(), type=Dashboard)


def substitute(text: str, values: dict[str, str]) -> str:
    """`text` with its variables replaced. KeyError for one that is not among `values`."""
    return _VARIABLE.sub(lambda found: values[found[1] or found[2]], text)


def legend(form: str, metric: dict[str, str]) -> str:
    """A legend as Grafana fills it; a label that is absent is empty."""
    return re.sub(r"\{\{ *(\w+) *\}\}", lambda found: metric.get(found[1], ""), form).strip()


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A server to ask."""

    url: str

    def series(self, expr: str) -> list[Series]:
        """Now. OSError if it cannot be reached or refuses the expression."""
        return msgspec.json.decode(self._get("query", query=expr), type=_Answer).data.result

    def range(self, expr: str, *, start: float, end: float, step: float) -> list[Series]:
        """From `start` to `end`. OSError as above."""
        asked = self._get("query_range", query=expr, start=str(start), end=str(end), step=str(step))
        return msgspec.json.decode(asked, type=_Answer).data.result

    def label_values(self, definition: str) -> list[str]:
        """What a variable defined as label_values(selector, label) offers."""
        found = _LABEL_VALUES.fullmatch(definition)
        if found is None:
            raise ValueError(f"{definition} is not label_values(selector, label)")
        asked = self._get(f"label/{found[2]}/values", **{"match[]": found[1]})
        return msgspec.json.decode(asked, type=_Labels).data

    def _get(self, path: str, **parameters: str) -> bytes:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            with error:
                words = json.loads(error.read() or b"{}").get("error", error.reason)
            raise OSError(f"{self.url} answers {error.code} to {parameters}: {words}") from error


def everything(dashboard: Dashboard, *, rate_interval: str) -> dict[str, str]:
    """The variables with All chosen in each."""
    chosen = {one.name: one.all_value for one in dashboard.templating.list if one.type == "query"}
    return chosen | {"__rate_interval": rate_interval}
