"""A report as a picture: the roofline with the model's parts on it, and throughput over latency.

matplotlib is loaded when something is drawn and nowhere else. One figure, no global state; the same report gives the
same bytes (SVG ids and dates are fixed).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ostrya.capacity.chips import Slice
from ostrya.capacity.facts import Decoding, Report
from ostrya.capacity.figures import Asked
from ostrya.capacity.fitted import fitted
from ostrya.capacity.published import POINTS, Engine, Measure, Point
from ostrya.capacity.report import batch_ladder
from ostrya.capacity.spec import ModelSpec, Part
from ostrya.capacity.step import StepTime
from ostrya.capacity.values import FLOP_SCALES, scaled, size
from ostrya.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart by every kind of colour vision.
_BLACK = "#222222"
_BLUE, _ORANGE, _GREEN, _PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
_SERIES: Mapping[str, tuple[str, frozenset[Part]]] = MappingProxyType(
    {
        "routed experts": (_ORANGE, frozenset({Part.ROUTED_EXPERTS})),
        "KV cache": (_GREEN, frozenset({Part.CACHE})),
        "recurrent state": (_PINK, frozenset({Part.STATE})),
    }
)
_OTHERS = ("other weights", _BLUE)
"""They are read once per step for all requests, so that their dots would lie upon each other."""
_ROOFLINE_STEP = 8
"""Between the batches of two dots: 1, 8, 64, …"""
_NARROW_RATIO = 100
"""An axis that spans less has ticks at 2 and 5 too."""
_STYLE = MappingProxyType({"svg.hashsalt": "ostrya", "font.size": 9.0, "font.family": "DejaVu Sans"})


def draw(spec: ModelSpec, where: Slice, report: Report, path: Path) -> None:
    """Writes `path` in the format of its suffix. ConfigError without matplotlib; OSError if it cannot be written."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(["--plot needs matplotlib: pip install 'ostrya[plot]'"]) from error
    with rc_context(dict(_STYLE)):
        figure = Figure(figsize=(11, 5), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _draw_roofline(left, spec, where, report)
        _draw_frontier(right, spec, where, report)
        chips = "1 chip" if where.num_chips == 1 else f"{where.num_chips} chips"
        title = (
            f"{spec.name} on {where.name} ({chips}), decoding with {report.setup.context_tokens:,} tokens of context"
        )
        figure.suptitle(title, fontsize=11, fontweight="bold", color=_BLACK)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)


def _draw_roofline(axes: "Axes", spec: ModelSpec, where: Slice, report: Report) -> None:
    asked = Asked(spec=spec, where=where, setup=report.setup)
    steps = [asked.step(asked.factors, batch) for batch in _ladder(report.fit.max_requests)]
    chip = where.chip
    peak = max(chip.peaks.values())
    lines = [(name, colour, _dots(steps, parts, where)) for name, (colour, parts) in _SERIES.items()]
    named = frozenset().union(*(parts for _, parts in _SERIES.values()))
    lines.append((*_OTHERS, _dots(steps, frozenset(Part) - named, where)))
    lines = [line for line in lines if line[2]]
    places = [dot for _, _, dots in lines for dot in dots]
    low, high = min(x for x, _ in places) / 3, max(peak / chip.hbm_bytes_per_s * 8, 2 * max(x for x, _ in places))
    for flops_per_s in sorted(set(chip.peaks.values())):
        dtypes = ", ".join(dtype for dtype, one in chip.peaks.items() if one == flops_per_s)
        axes.plot([flops_per_s / chip.hbm_bytes_per_s, high], [flops_per_s] * 2, color=_BLACK, linewidth=1.2)
        axes.text(high, flops_per_s * 1.12, f"{scaled(flops_per_s, FLOP_SCALES)} {dtypes}", ha="right", fontsize=8)
    axes.plot([low, peak / chip.hbm_bytes_per_s], [low * chip.hbm_bytes_per_s, peak], color=_BLACK, linewidth=1.2)
    for name, colour, dots in lines:
        axes.plot(*zip(*dots, strict=True), color=colour, marker="o", markersize=5, linewidth=1, label=name)
    whole = _dots(steps, frozenset(Part), where, overhead=True)
    axes.plot(*zip(*whole, strict=True), color=_BLACK, marker="s", markersize=5, linewidth=1, label="whole step")
    for (x, y), step in zip(whole, steps, strict=True):
        axes.annotate(
            f"{step.works[0].num_requests:,}", (x, y), (5, -10), textcoords="offset points", fontsize=7.5, color=_BLACK
        )
    x = low * 6
    slope = f"{size(chip.hbm_bytes_per_s)}/s"
    axes.annotate(slope, (x, x * chip.hbm_bytes_per_s), (-4, 4), textcoords="offset points", ha="right", fontsize=8)
    axes.set_xlim(low, high)
    axes.set_ylim(min(y for _, y in [*places, *whole]) / 2.5, peak * 2.5)
    _dress(axes, f"Roofline of a chip; estimate: {report.setup.engine}", "FLOPs per byte of HBM", "FLOP/s per chip")


def _draw_frontier(axes: "Axes", spec: ModelSpec, where: Slice, report: Report) -> None:
    ladder = batch_ladder(report.fit.max_requests)
    most = fitted(Engine.FUSED, where.chip.name).max_requests
    fused = tuple(batch for batch in ladder if batch <= most)

    def decoding(engine: Engine, batches: Sequence[int]) -> list[Decoding]:
        asked = Asked(spec=spec, where=where, setup=replace(report.setup, engine=engine))
        return [asked.decoding(batch) for batch in batches]

    serving = decoding(Engine.SERVING, ladder)
    curves = (
        ("limit", _BLACK, attrgetter("limit"), serving),
        ("estimate, serving engine", _BLUE, attrgetter("estimate"), serving),
        ("estimate, fused kernel", _ORANGE, attrgetter("estimate"), decoding(Engine.FUSED, fused)),
    )
    for name, colour, which, points in curves:
        last = points[-1].num_requests
        # Not where the largest batch stands close by.
        labelled = {last, *(batch for batch in _ladder(last) if 2 * batch < last)}
        x = [which(point.tokens_per_s_per_user) for point in points]
        y = [which(point.tokens_per_s_per_chip) for point in points]
        axes.plot(x, y, "-", color=colour, marker="o", markersize=3.5, linewidth=1.5, label=name)
        for place, point in zip(zip(x, y, strict=True), points, strict=True):
            if point.num_requests in labelled:
                axes.annotate(
                    f"{point.num_requests:,}", place, (5, 3), textcoords="offset points", fontsize=7.5, color=colour
                )
    for kind, marker, measured in _published(spec, where):
        users = [one.value / one.num_requests for one in measured]
        chips = [one.value / where.num_chips for one in measured]
        axes.plot(users, chips, marker, color=_ORANGE, markerfacecolor="white", markersize=7, label=kind, zorder=3)
    _dress(axes, "Throughput over speed", "tokens/s for each user", "tokens/s per chip")


def _published(spec: ModelSpec, where: Slice) -> list[tuple[str, str, list[Point]]]:
    """What was measured with this very model and slice, decoding alone."""
    here = [
        point
        for point in POINTS
        if (point.model, point.slice_name, point.measure) == (spec.name, where.name, Measure.TOKENS_PER_S)
    ]
    plain = [point for point in here if not point.num_draft_tokens]
    drafted = [point for point in here if point.num_draft_tokens]
    kinds = [("published", "D", plain), ("published, forced acceptance", "^", drafted)]
    return [kind for kind in kinds if kind[2]]


def _ladder(largest: int) -> list[int]:
    batches = [1]
    while batches[-1] * _ROOFLINE_STEP <= largest:
        batches.append(batches[-1] * _ROOFLINE_STEP)
    return batches


def _dots(
    steps: Sequence[StepTime], parts: frozenset[Part], where: Slice, *, overhead: bool = False
) -> list[tuple[float, float]]:
    """FLOPs per byte and FLOP/s per chip of `parts`, for every step in which they do anything."""
    dots = []
    for step in steps:
        chosen = [part for part in step.parts if part.part in parts]
        num_bytes, num_flops = (sum(one) for one in ([p.num_bytes for p in chosen], [p.num_flops for p in chosen]))
        seconds = step.seconds if overhead else sum(part.seconds for part in chosen)
        if num_bytes and num_flops and seconds:
            dots.append((num_flops / num_bytes, num_flops / seconds / where.num_chips))
    return dots


def _tick(value: float) -> str:
    """1,000, and 10 T for FLOP/s."""
    for scale, unit in FLOP_SCALES:
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:,g}"


def _dress(axes: "Axes", title: str, across: str, up: str) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        steps = (1.0, 2.0, 5.0) if high / low < _NARROW_RATIO else (1.0,)
        axis.set_major_locator(LogLocator(subs=steps))
        axis.set_major_formatter(lambda value, _: _tick(value))
        axis.set_minor_formatter("")
    axes.set_title(title, fontsize=10, loc="left", color=_BLACK)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(visible=True, which="major", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=3,
        fontsize=8,
        frameon=False,
        title="numbers are batches",
        title_fontsize=8,
    )
