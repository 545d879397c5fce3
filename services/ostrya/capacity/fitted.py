"""Which published points are behind an engine's factors, and how far an estimate reaches beyond them."""

from ostrya.capacity.chips import find_slice
from ostrya.capacity.published import POINTS, Engine, Point, Use


def fitted_generations(engine: Engine) -> tuple[str, ...]:
    """Of the chips whose published points the engine's factors were fitted to."""
    return tuple(dict.fromkeys(find_slice(point.slice_name).chip.name for point in _fitted(engine)))


def fitted_num_chips(engine: Engine) -> tuple[int, ...]:
    """Of the slices of those points, ascending."""
    return tuple(sorted({find_slice(point.slice_name).num_chips for point in _fitted(engine)}))


def fitted_max_requests(engine: Engine) -> int:
    """The largest batch of those points."""
    return max(point.num_requests for point in _fitted(engine))


def warning(engine: Engine, num_chips: int, num_requests: int) -> str | None:
    """One line, for an estimate beyond the slices or the batches of those points."""
    chips, most = fitted_num_chips(engine), fitted_max_requests(engine)
    if num_chips in chips and num_requests <= most:
        return None
    sizes = " and ".join(f"{size}-chip" for size in chips)
    return f"Warning: factors fitted on {sizes} slices, to batch {most:,}; the estimate reaches beyond."


def _fitted(engine: Engine) -> tuple[Point, ...]:
    return tuple(point for point in POINTS if (point.use, point.engine) == (Use.FITTED, engine))
