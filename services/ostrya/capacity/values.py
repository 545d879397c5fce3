"""Values as short words for a terminal: 2.78 T, 1.56 TB, 1.16 ms; and rows as aligned columns."""

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches

_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_BYTE_SCALES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
_NEARLY = 0.9995
"""What is rounded up to a unit is told in it: 1.00 MB, not 1,000 KB."""
FLOP_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def count(value: float) -> str:
    """2.78 T; parameters."""
    return scaled(value, _SCALES)


def size(num_bytes: float) -> str:
    """1.56 TB."""
    return scaled(num_bytes, _BYTE_SCALES, "B")


def duration(value: float) -> str:
    """1.16 ms."""
    for scale, unit, factor in ((1.0, "s", 1.0), (1e-3, "ms", 1e3)):
        if value >= _NEARLY * scale:
            return f"{three(value * factor)} {unit}"
    return f"{three(value * 1e6)} µs"


def unknown(what: str, name: str, names: Iterable[str]) -> str:
    """model 'kimi-k33' is not known (nearest: kimi-k3)."""
    close = get_close_matches(name[:64].lower(), names, n=1)
    return f"{what} {name[:64]!r} is not known" + (f" (nearest: {close[0]})" if close else "")


def per_time(per_s: float) -> str:
    """5.00/s, 10.0/h: in the unit that leaves at least 1."""
    for scale, unit in ((1, "s"), (60, "min")):
        if per_s * scale >= _NEARLY:
            return f"{three(per_s * scale)}/{unit}"
    return f"{three(per_s * 3600)}/h"


def table(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Lines with every column as wide as its widest cell, to the right but for `left`. Short rows are filled up."""
    width = max(map(len, rows))
    filled = [[*row, *[""] * (width - len(row))] for row in rows]
    widths = [max(len(row[column]) for row in filled) for column in range(width)]
    lines = []
    for row in filled:
        cells = (
            cell.ljust(wide) if column in left else cell.rjust(wide)
            for column, (cell, wide) in enumerate(zip(row, widths, strict=True))
        )
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def three(value: float) -> str:
    """Three digits, or all of a large number's."""
    if value >= _NEARLY * 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= _NEARLY * 10 else f"{value:.2f}"


def scaled(value: float, scales: Sequence[tuple[float, str]], smallest: str = "") -> str:
    """In the largest unit that leaves at least 1; below all of them, a whole number of `smallest`."""
    for scale, unit in scales:
        if abs(value) >= _NEARLY * scale:
            return f"{three(value / scale)} {unit}"
    return f"{value:,.0f} {smallest}".rstrip()
