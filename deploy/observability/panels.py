"""What a dashboard is made of, as values, and how it becomes Grafana's JSON.

A board (boards/*.py) says rows of panels; places on the grid, ids, variables and links come from here, the same for
all. Knows no metric name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Literal

Json = dict[str, object]
Kind = Literal["timeseries", "stat", "state-timeline", "barchart"]
Color = Literal["green", "yellow", "orange", "red", "blue", "purple", "gray"]

COLUMNS = 24
"""Of Grafana's grid."""
SCHEMA_VERSION = 39
TAG = "ostrya"
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
LETTERS = ascii_uppercase
TOKENS_PER_S = "suffix: tok/s"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression; the legend names its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Step:
    """From `value` on the colour is this."""

    value: float
    color: Color


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `text` says what it shows and what is bad, in plain words."""

    title: str
    text: str
    queries: tuple[Query, ...] = ()
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    decimals: int | None = None
    minimum: float | None = 0
    maximum: float | None = None
    below: Color = "green"
    """The colour below the first step."""
    steps: tuple[Step, ...] = ()
    names: tuple[tuple[float, str, Color], ...] = ()
    """Words for values, in a state timeline."""
    colors: tuple[tuple[str, Color], ...] = ()
    """Of series whose legend is known; the others take what comes."""
    matrix: tuple[str, str] | None = None
    """A bar chart's rows and the parts of each bar: two labels."""


@dataclass(frozen=True, slots=True)
class Row:
    """A headline and the panels under it, placed from left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A drop-down whose values are those of a label."""

    name: str
    label: str
    query: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    text: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()
    """Besides pool, router and replica, which all have so that links can carry them."""


VARIABLES = (
    Variable(name="pool", label="Pool", query="label_values(ostrya_router_info, pool)"),
    Variable(name="router", label="Router", query='label_values(ostrya_router_info{pool=~"$pool"}, replica)'),
    Variable(name="replica", label="Replica", query='label_values(ostrya_worker_info{pool=~"$pool"}, replica)'),
)


SIMULATED: Json = {
    "name": "Simulated",
    "datasource": DATASOURCE,
    "enable": True,
    "hide": False,
    "iconColor": "purple",
    "expr": 'max by (replica) (ostrya_worker_simulated{pool=~"$pool", replica=~"$replica"}) == 1',
    "step": "60s",
    "titleFormat": "Simulated",
    "textFormat": "{{replica}} computes nothing: its times, and those of requests it answered, are predictions.",
    "useValueForTime": False,
}
"""Drawn over every panel of every board, while a replica has backend roofline."""


def board_json(board: Board, boards: Sequence[Board]) -> Json:
    """The dashboard as Grafana loads it, with links to the others of `boards`. ValueError: a panel is too wide."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.text,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [SIMULATED]},
        "links": [_link(other) for other in boards if other is not board],
        "templating": {"list": [_datasource(), *map(_variable, (*VARIABLES, *board.variables))]},
        "panels": _place(board.rows),
    }


def _link(board: Board) -> Json:
    return {
        "type": "link",
        "title": board.title,
        "tooltip": board.text,
        "url": f"/d/{board.uid}",
        "icon": "dashboard",
        "keepTime": True,
        "includeVars": True,
        "targetBlank": False,
        "asDropdown": False,
        "tags": [],
    }


def _datasource() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "regex": "",
        "hide": 0,
        "refresh": 1,
        "multi": False,
        "includeAll": False,
        "options": [],
        "current": {},
    }


def _variable(variable: Variable) -> Json:
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": variable.query,
        "query": {"query": variable.query, "refId": "StandardVariableQuery"},
        "regex": "",
        "hide": 0,
        "refresh": 2,  # with the time range, so that replicas that came later are found
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "options": [],
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _place(rows: Sequence[Row]) -> list[Json]:
    placed: list[Json] = []
    y = 0
    for row in rows:
        placed.append(_row_json(row, number=len(placed) + 1, y=y))
        y += 1
        x = line_height = 0
        for panel in row.panels:
            if not 0 < panel.width <= COLUMNS:
                raise ValueError(f"panel {panel.title!r} is {panel.width} wide; the grid has {COLUMNS} columns")
            if x + panel.width > COLUMNS:
                x, y, line_height = 0, y + line_height, 0
            grid: Json = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            placed.append(_panel_json(panel, number=len(placed) + 1, grid=grid))
            x, line_height = x + panel.width, max(line_height, panel.height)
        y += line_height
    return placed


def _row_json(row: Row, *, number: int, y: int) -> Json:
    grid = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": grid, "panels": []}


def _panel_json(panel: Panel, *, number: int, grid: Json) -> Json:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "gridPos": grid,
        "options": _options(panel),
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": [_override(*one) for one in panel.colors]},
        "targets": [_target(panel, query, letter) for query, letter in zip(panel.queries, LETTERS, strict=False)],
        "transformations": _transformations(panel),
    }


def _target(panel: Panel, query: Query, letter: str) -> Json:
    # A bar chart shows the present; everything else has a past.
    instant = panel.kind == "barchart"
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": not instant,
        "instant": instant,
        "format": "table" if instant else "time_series",
    }


def _transformations(panel: Panel) -> list[Json]:
    if panel.matrix is None:
        return []
    rows, parts = panel.matrix
    return [
        {"id": "groupingToMatrix", "options": {"rowField": rows, "columnField": parts, "valueField": "Value"}},
    ]


def _override(legend: str, color: Color) -> Json:
    fixed = {"id": "color", "value": {"mode": "fixed", "fixedColor": color}}
    return {"matcher": {"id": "byName", "options": legend}, "properties": [fixed]}


def _field_defaults(panel: Panel) -> Json:
    defaults: Json = {
        "unit": panel.unit,
        "custom": _custom(panel),
        "color": {"mode": "thresholds" if panel.kind in ("stat", "state-timeline") else "palette-classic"},
        "mappings": _mappings(panel),
        "thresholds": {
            "mode": "absolute",
            "steps": [
                {"color": panel.below, "value": None},
                *({"color": step.color, "value": step.value} for step in panel.steps),
            ],
        },
    }
    limits = {"min": panel.minimum, "max": panel.maximum, "decimals": panel.decimals}
    return defaults | {name: value for name, value in limits.items() if value is not None}


def _custom(panel: Panel) -> Json:
    if panel.kind == "state-timeline":
        return {"lineWidth": 0, "fillOpacity": 80}
    if panel.kind == "barchart":
        return {"lineWidth": 0, "fillOpacity": 80}
    if panel.kind != "timeseries":
        return {}
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 8,
        "showPoints": "auto",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.steps else "off"},
    }


def _mappings(panel: Panel) -> list[Json]:
    options = {
        f"{value:g}": {"text": text, "color": color, "index": index}
        for index, (value, text, color) in enumerate(panel.names)
    }
    return [{"type": "value", "options": options}] if options else []


def _options(panel: Panel) -> Json:
    legend: Json = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    match panel.kind:
        case "timeseries":
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        case "stat":
            return {
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "colorMode": "value",
                "graphMode": "area",
                "textMode": "value_and_name",
                "orientation": "auto",
                "justifyMode": "auto",
            }
        case "state-timeline":
            return {
                "showValue": "auto",
                "rowHeight": 0.8,
                "mergeValues": True,
                "alignValue": "left",
                "legend": legend,
                "tooltip": {"mode": "single", "sort": "none"},
            }
        case "barchart":
            return {
                "orientation": "horizontal",
                "stacking": "normal",
                "showValue": "auto",
                "barWidth": 0.7,
                "groupWidth": 0.7,
                "legend": legend,
                "tooltip": {"mode": "multi", "sort": "none"},
            }
