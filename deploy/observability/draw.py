"""Draws one panel into matplotlib axes, in the manner of Grafana's panel of that type; plot.py has the data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from matplotlib.axes import Axes
from matplotlib.dates import DateFormatter, date2num
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from deploy.observability.units import scale, shown
from deploy.observability.viewer import Defaults, Panel

INK, FAINT, GRID, PAPER = "#22252b", "#7f858f", "#e9ebee", "#ffffff"
COLORS = {
    "green": "#4c9f50",
    "yellow": "#e3b505",
    "orange": "#f08228",
    "red": "#d64541",
    "blue": "#3d71d9",
    "purple": "#8f5bd0",
    "gray": "#9aa0a6",
}
PALETTE = ("#3d71d9", "#f08228", "#4c9f50", "#d64541", "#8f5bd0", "#14a0a5", "#c2559c", "#8a6d3b", "#9aa0a6", "#b5c334")
MAX_LEGEND_ROWS = 3
LINE_WIDTH = 1.3
TIME_STEPS_S = (10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)


@dataclass(frozen=True, slots=True)
class Line:
    """One named series."""

    name: str
    labels: dict[str, str]
    samples: Sequence[tuple[float, float]]

    @property
    def times(self) -> list[float]:
        """As matplotlib counts them."""
        return [date2num(datetime.fromtimestamp(at)) for at, _ in self.samples]

    @property
    def values(self) -> list[float]:
        """NaN where there was nothing to divide."""
        return [value for _, value in self.samples]

    @property
    def last(self) -> float:
        """The newest value that is a number; NaN without one."""
        return next((value for value in reversed(self.values) if math.isfinite(value)), math.nan)


def draw(axes: Axes, panel: Panel, lines: Sequence[Line], *, start: float, end: float) -> None:
    """Data, axes and legend. Says so where there is no data."""
    axes.tick_params(labelsize=7.5, colors=FAINT, length=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    lines = [line for line in lines if math.isfinite(line.last)]
    if not lines:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center", va="center", color=FAINT, fontsize=10)
        return
    match panel.type:
        case "stat":
            _stat(axes, panel, lines)
        case "barchart":
            _bars(axes, panel, lines)
        case "state-timeline":
            _states(axes, panel, lines)
            _time_axis(axes, start, end)
        case _:
            _lines(axes, panel, lines)
            _time_axis(axes, start, end)


def _lines(axes: Axes, panel: Panel, lines: Sequence[Line]) -> None:
    shape, colors = _defaults(panel), _colors(panel, lines)
    if _is_stacked(shape):
        highest = _stack(axes, lines, colors)
    else:
        for line, color in zip(lines, colors, strict=True):
            axes.plot(line.times, line.values, color=color, linewidth=LINE_WIDTH, label=line.name)
        highest = max(value for line in lines for value in line.values if math.isfinite(value))
    top = highest * 1.12 if highest > 0 else 1.0
    # A share near 1 is shown up to 1; the limits of one that may be negative are kept as they are.
    lowest = shape.min or 0.0
    axes.set_ylim(lowest, shape.max if shape.max is not None and (lowest < 0 or top > shape.max) else top)
    for step in shape.thresholds.steps:
        # A limit far above the data would flatten them; Grafana's soft limits leave it out too.
        if step.value is not None and step.value <= axes.get_ylim()[1]:
            axes.axhline(step.value, color=COLORS[step.color], linewidth=1, linestyle=(0, (4, 3)))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.yaxis.set_major_locator(_ticks(*axes.get_ylim(), shape.unit, whole=shape.decimals == 0))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, shape.unit, shape.decimals)))
    _legend(axes)


def _stack(axes: Axes, lines: Sequence[Line], colors: Sequence[str]) -> float:
    """The height of the highest stack."""
    times = sorted({at for line in lines for at in line.times})
    below = [0.0] * len(times)
    for line, color in zip(lines, colors, strict=True):
        known = {at: value for at, value in zip(line.times, line.values, strict=True) if math.isfinite(value)}
        above = [low + known.get(at, 0.0) for at, low in zip(times, below, strict=True)]
        axes.fill_between(times, below, above, color=color, alpha=0.3, linewidth=0, label=line.name)
        # Without an edge where it is 0: that would paint over the edge of what lies below.
        edge = [high if high > low else math.nan for low, high in zip(below, above, strict=True)]
        axes.plot(times, edge, color=color, linewidth=LINE_WIDTH)
        below = above
    return max(below)


def _ticks(low: float, high: float, unit: str, *, whole: bool) -> FixedLocator:
    """Round numbers in the unit that is shown, not in the base unit."""
    factor = scale(max(abs(low), abs(high)), unit)
    places = MaxNLocator(4, integer=whole).tick_values(low / factor, high / factor)
    return FixedLocator([place * factor for place in places if low <= place * factor <= high])


def _legend(axes: Axes) -> None:
    figure = axes.get_figure(root=True)
    assert figure is not None
    width_in, height_in = figure.get_size_inches() * axes.get_position().size
    handles, names = axes.get_legend_handles_labels()
    # Letters of this size are about 0.062 inches wide, and the handle takes as much as six.
    num_columns = min(4, max(1, int(width_in / ((max(map(len, names)) + 6) * 0.062))))
    if len(names) > (limit := num_columns * MAX_LEGEND_ROWS):
        handles, names = handles[: limit - 1], [*names[: limit - 1], f"and {len(names) - limit + 1} more"]
        handles.append(axes.plot([], [], alpha=0)[0])
    axes.legend(
        handles,
        names,
        loc="upper left",
        bbox_to_anchor=(0, -0.3 / height_in),
        ncols=num_columns,
        fontsize=7.5,
        frameon=False,
        labelcolor=INK,
        handlelength=1.1,
        handletextpad=0.5,
        columnspacing=1.2,
        borderaxespad=0,
        borderpad=0,
        labelspacing=0.25,
    )


def _stat(axes: Axes, panel: Panel, lines: Sequence[Line]) -> None:
    shape = _defaults(panel)
    axes.set_xticks([])
    axes.set_yticks([])
    for place, line in enumerate(lines):
        color = COLORS[
            [step.color for step in shape.thresholds.steps if step.value is None or line.last >= step.value][-1]
        ]
        middle = (place + 0.5) / len(lines)
        spark = axes.inset_axes((place / len(lines), 0, 1 / len(lines), 0.3))
        spark.set_axis_off()
        spark.fill_between(line.times, line.values, min(line.values), color=color, alpha=0.15, linewidth=0)
        spark.plot(line.times, line.values, color=color, linewidth=1, alpha=0.6)
        words = shown(line.last, shape.unit, shape.decimals)
        big = axes.text(middle, 0.78, words, transform=axes.transAxes, color=color, fontsize=21, weight="bold")
        small = axes.text(middle, 0.44, line.name, transform=axes.transAxes, color=FAINT, fontsize=8.5)
        for text in (big, small):
            text.set(ha="center", va="center")


def _states(axes: Axes, panel: Panel, lines: Sequence[Line]) -> None:
    words = _defaults(panel).mappings[0].options
    for row, line in enumerate(reversed(lines)):
        whole = line.times[-1] - line.times[0]
        for begin, end, value in _runs(line):
            word = words.get(f"{value:g}", {"text": f"{value:g}", "color": "gray"})
            axes.barh(row, end - begin, left=begin, height=0.62, color=COLORS[str(word["color"])], alpha=0.85)
            if end - begin > 0.15 * whole:
                middle = begin + (end - begin) / 2
                axes.text(middle, row, str(word["text"]), ha="center", va="center", fontsize=7.5, color=PAPER)
    axes.set_yticks(range(len(lines)), [line.name for line in reversed(lines)], color=INK)
    axes.set_ylim(*((-0.6, len(lines) - 0.4) if len(lines) > 1 else (-1, 1)))


def _runs(line: Line) -> list[tuple[float, float, float]]:
    """Begin, end and value of each stretch in which the value stays."""
    runs: list[tuple[float, float, float]] = []
    for at, value in zip(line.times, line.values, strict=True):
        if runs:
            begin, _, before = runs[-1]
            runs[-1] = (begin, at, before)
        if not runs or runs[-1][2] != value:
            runs.append((at, at, value))
    return runs


def _bars(axes: Axes, panel: Panel, lines: Sequence[Line]) -> None:
    shape, (matrix,) = _defaults(panel), panel.transformations
    of_row, of_part = matrix.options["rowField"], matrix.options["columnField"]
    rows = sorted({line.labels[of_row] for line in lines}, reverse=True)
    parts = sorted({line.labels[of_part] for line in lines})
    lengths = {(line.labels[of_row], line.labels[of_part]): line.last for line in lines}
    ends = dict.fromkeys(rows, 0.0)
    for part, color in zip(parts, PALETTE, strict=False):
        widths = [lengths.get((row, part), 0.0) for row in rows]
        axes.barh(range(len(rows)), widths, left=list(ends.values()), height=0.6, color=color, alpha=0.85, label=part)
        ends = {row: end + width for (row, end), width in zip(ends.items(), widths, strict=True)}
    for row, end in enumerate(ends.values()):
        axes.text(end, row, f"  {shown(end, shape.unit)}", va="center", fontsize=7.5, color=INK)
    axes.set_xlim(0, max(ends.values()) * 1.15 or 1)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_yticks(range(len(rows)), rows, color=INK)
    axes.xaxis.set_major_locator(_ticks(*axes.get_xlim(), shape.unit, whole=False))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, shape.unit)))
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    _legend(axes)


def _defaults(panel: Panel) -> Defaults:
    assert panel.field_config is not None
    return panel.field_config.defaults


def _is_stacked(shape: Defaults) -> bool:
    stacking = shape.custom["stacking"]
    return isinstance(stacking, dict) and stacking["mode"] == "normal"


def _colors(panel: Panel, lines: Sequence[Line]) -> list[str]:
    assert panel.field_config is not None
    fixed = panel.field_config.colors
    return [
        COLORS[fixed[line.name]] if line.name in fixed else PALETTE[place % len(PALETTE)]
        for place, line in enumerate(lines)
    ]


def _time_axis(axes: Axes, start: float, end: float) -> None:
    step = next((step for step in TIME_STEPS_S if (end - start) / step <= 4.5), TIME_STEPS_S[-1])
    first = math.ceil(start / step) * step
    places = [
        date2num(datetime.fromtimestamp(first + number * step)) for number in range(int((end - first) / step) + 1)
    ]
    axes.set_xlim(*(date2num(datetime.fromtimestamp(at)) for at in (start, end)))
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M" if step >= 60 else "%H:%M:%S"))
