"""Numbers as Grafana's units show them, for plot.py."""

import math

_Scales = tuple[tuple[float, str], ...]
_DURATIONS: _Scales = (
    (86_400.0, " d"),
    (3_600.0, " h"),
    (60.0, " min"),
    (1.0, " s"),
    (1e-3, " ms"),
    (1e-6, " µs"),
    (0.0, " s"),
)
_BYTES: _Scales = ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (0.0, " B"))
_RATES = {"reqps": " req/s", "ops": " /s"}


def shown(value: float, unit: str, decimals: int | None = None) -> str:
    """`value` in a few characters; `decimals` only where Grafana was told some."""
    if not math.isfinite(value):
        return "-"
    factor, word = _scale(value, unit)
    scaled = value / factor
    digits = f"{scaled:.{decimals}f}" if decimals is not None and factor <= 1 else f"{scaled:.3g}"
    return digits + word


def scale(value: float, unit: str) -> float:
    """What is 1 in the unit in which `value` is shown."""
    return _scale(value, unit)[0]


def _scale(value: float, unit: str) -> tuple[float, str]:
    match unit:
        case "percentunit":
            return 0.01, " %"
        case "percent":
            return 1.0, " %"
        case "s":
            return _chosen(value, _DURATIONS)
        case "bytes":
            return _chosen(value, _BYTES)
        case _:
            word = unit.removeprefix("suffix:") if unit.startswith("suffix:") else _RATES.get(unit, "")
            return _chosen(value, ((1e9, " G" + word), (1e6, " M" + word), (1e3, " k" + word), (0.0, word)))


def _chosen(value: float, scales: _Scales) -> tuple[float, str]:
    factor, word = next((factor, word) for factor, word in scales if abs(value) >= factor)
    return factor or 1.0, word
