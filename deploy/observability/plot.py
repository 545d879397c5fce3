"""Draws a dashboard from a live Prometheus into a PNG: `python -m deploy.observability.plot --help`.

Runs the very queries of dashboards/*.json, so the picture shows what Grafana would. Needs matplotlib (extra dev).
"""

import argparse
import sys
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

from deploy.observability.draw import FAINT, INK, PAPER, Line, draw
from deploy.observability.viewer import Dashboard, Panel, Prometheus, everything, legend, load, substitute

COLUMNS = 24
UNIT_W, UNIT_H = 0.71, 0.34
"""Inches of one unit of the grid."""
HEAD, MARGIN, GAP = 0.55, 0.15, 0.05
TABLE = "#f1f3f5"
"""What the panels lie on."""
DPI = 96
NUM_POINTS = 240


def picture(dashboard: Dashboard, prometheus: Prometheus, *, minutes: float, rate_interval: str, note: str) -> bytes:
    """The dashboard over the last `minutes`, as a PNG. OSError if Prometheus cannot be asked."""
    end = time.time()
    start = end - 60 * minutes
    height = max(panel.grid_pos.y + panel.grid_pos.h for panel in dashboard.panels) * UNIT_H + HEAD + MARGIN
    width = COLUMNS * UNIT_W + 2 * MARGIN
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=TABLE)
    figure.text(MARGIN * 2 / width, 1 - 0.3 / height, dashboard.title, fontsize=15, fontweight="bold", color=INK)
    figure.text(1 - MARGIN * 2 / width, 1 - 0.3 / height, note, fontsize=9, color=FAINT, ha="right")
    variables = everything(dashboard, rate_interval=rate_interval)
    for panel in dashboard.panels:
        if panel.type == "row":
            _headline(figure, panel)
            continue
        _card(figure, panel)
        lines = fetch(panel, prometheus, variables, start=start, end=end)
        draw(figure.add_axes(_rectangle(figure, panel), facecolor="none"), panel, lines, start=start, end=end)
    return _png(figure)


def fetch(panel: Panel, prometheus: Prometheus, variables: dict[str, str], *, start: float, end: float) -> list[Line]:
    """What the panel's queries give, named by their legends."""
    lines = []
    for target in panel.targets:
        expr = substitute(target.expr, variables)
        if target.instant:
            found = prometheus.series(expr)
        else:
            found = prometheus.range(expr, start=start, end=end, step=max(1.0, (end - start) / NUM_POINTS))
        lines += [Line(legend(target.legend_format, one.metric), one.metric, one.samples) for one in found]
    return lines


def _headline(figure: Figure, panel: Panel) -> None:
    width, height = figure.get_size_inches()
    y = 1 - (HEAD + (panel.grid_pos.y + 0.75) * UNIT_H) / height
    figure.text(MARGIN * 2 / width, y, panel.title, fontsize=11, color=FAINT)


def _card(figure: Figure, panel: Panel) -> None:
    """The paper under a panel, and its title."""
    width, height = figure.get_size_inches()
    grid = panel.grid_pos
    left, bottom = MARGIN + grid.x * UNIT_W + GAP, height - HEAD - (grid.y + grid.h) * UNIT_H + GAP
    across, up = grid.w * UNIT_W - 2 * GAP, grid.h * UNIT_H - 2 * GAP
    corner = (left / width, bottom / height)
    figure.add_artist(
        FancyBboxPatch(
            corner,
            across / width,
            up / height,
            boxstyle="square,pad=0",
            transform=figure.transFigure,
            facecolor=PAPER,
            edgecolor="#dde0e4",
            linewidth=0.8,
            zorder=-1,
        )
    )
    figure.text(
        (left + 0.14) / width, (bottom + up - 0.24) / height, panel.title, fontsize=9.5, weight="bold", color=INK
    )


def _rectangle(figure: Figure, panel: Panel) -> tuple[float, float, float, float]:
    """Left, bottom, width and height of the axes, with room for title, ticks and legend around them."""
    width, height = figure.get_size_inches()
    grid = panel.grid_pos
    room_left, room_above, room_right, room_below = _room(panel)
    left = MARGIN + grid.x * UNIT_W + room_left
    bottom = height - HEAD - (grid.y + grid.h) * UNIT_H + room_below
    across = grid.w * UNIT_W - room_left - room_right
    up = grid.h * UNIT_H - room_above - room_below
    return left / width, bottom / height, across / width, up / height


def _room(panel: Panel) -> tuple[float, float, float, float]:
    """Inches: left, above, right, below."""
    match panel.type:
        case "stat":
            return 0.2, 0.45, 0.2, 0.15
        case "state-timeline":
            return 1.1 if panel.targets[0].legend_format == "{{instance}}" else 0.75, 0.42, 0.25, 0.42
        case _:
            return 0.75, 0.5, 0.25, 0.8 if panel.grid_pos.h > 6 else 0.62


def _png(figure: Figure) -> bytes:
    drawn, small = BytesIO(), BytesIO()
    figure.savefig(drawn, format="png")
    with Image.open(drawn) as image:
        # Lines and text need no more colours, and the file is a third of the size.
        palette = image.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    palette.save(small, format="png", optimize=True)
    return small.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Draw dashboards from a live Prometheus.")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="URL (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=15, help="how far back (default: %(default)s)")
    parser.add_argument("--rate-interval", default="1m", help="four scrape intervals (default: %(default)s)")
    parser.add_argument("--note", default="", help="shown at the top right")
    parser.add_argument("--out", type=Path, required=True, help="directory for the PNGs")
    parser.add_argument("dashboards", type=Path, nargs="+", help="files of dashboards/")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    mpl.rcParams["font.family"] = "DejaVu Sans"
    prometheus = Prometheus(given.prometheus)
    for path in given.dashboards:
        image = picture(
            load(path), prometheus, minutes=given.minutes, rate_interval=given.rate_interval, note=given.note
        )
        (given.out / f"{path.stem}.png").write_bytes(image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
