"""`ostrya capacity --check` as text: every published point, how far the model is from it, and where it comes from."""

from collections.abc import Mapping, Sequence
from statistics import median

from ostrya.capacity.estimate import ASSUMED, Residual, held_out_errors
from ostrya.capacity.published import Engine, Point
from ostrya.capacity.step import Efficiency
from ostrya.capacity.values import duration, table, three

Factors = Mapping[tuple[Engine, str], Efficiency]


def check_text(rows: Sequence[Residual], unseen: Sequence[Residual], factors: Factors) -> str:
    """Points that can be compared, the factors that were fitted to some of them, the others, and the sources.

    `unseen`: the fitted points again, each against factors fitted without it.
    """
    named = dict.fromkeys(row.point.source for row in rows)
    marks = {source: f"[{number}]" for number, source in enumerate(named, 1)}
    others = [row.point for row in rows if row.error_ratio is None]
    lines = [
        "PUBLISHED POINTS  error: estimate / published - 1; unseen: that of a fit without the point",
        *_compared(rows, {row.point: row for row in unseen}, marks),
    ]
    lines += [
        "",
        "FITTED FACTORS  shares of the peaks, and time per layer of a step; in brackets: assumed",
        *_factors(factors),
    ]
    if others:
        cells = [(one.name, three(one.value), one.measure.value, one.reason, marks[one.source]) for one in others]
        lines += ["", "NOT COMPARABLE", *table(cells, left=(0, 2, 3))]
    return "\n".join([*lines, "", "SOURCES", *(f"  {mark} {source}" for source, mark in marks.items())])


def _compared(rows: Sequence[Residual], unseen: Mapping[Point, Residual], marks: Mapping[str, str]) -> list[str]:
    cells = [("point", "slice", "published", "", "limit", "estimate", "error", "unseen", "use", "from")]
    notes = []
    for row in rows:
        point, error_ratio = row.point, row.error_ratio
        if error_ratio is None or row.limit is None or row.estimate is None:
            continue
        cells.append(
            (
                point.name,
                point.slice_name,
                three(point.value),
                point.measure.value,
                three(row.limit),
                three(row.estimate),
                f"{error_ratio:+.0%}",
                _error(unseen.get(point)),
                point.use.value,
                marks[point.source],
            )
        )
        if point.reason:
            notes.append(f"  {point.name}: {point.reason}.")
    if errors := held_out_errors(rows):
        spread = f"median error {median(errors):.0%}, worst {errors[-1]:.0%}"
        notes.append(f"  Held out of the fit, and following from no fitted one: {len(errors)} points, {spread}.")
    return [*table(cells, left=(0, 1, 3, 8)), *notes]


def _error(row: Residual | None) -> str:
    if row is None:
        return ""
    return "-" if row.error_ratio is None else f"{row.error_ratio:+.0%}"


def _factors(factors: Factors) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("engine", "", "bandwidth", "of routed experts", "of caches", "FLOP/s", "links not hidden", "per layer")
    ]
    for (engine, generation), one in factors.items():
        shares = (
            f"({getattr(one, name):.0%})" if name in ASSUMED[engine] else f"{getattr(one, name):.0%}"
            for name in _SHARES
        )
        rows.append((engine.value, generation, *shares, duration(one.layer_overhead_s)))
    return table(rows, left=(0, 1))


_SHARES = (
    "dense_bandwidth_ratio",
    "expert_bandwidth_ratio",
    "cache_bandwidth_ratio",
    "flops_ratio",
    "exposed_ici_ratio",
)
