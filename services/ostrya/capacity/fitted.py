"""Which published points are behind an estimate's factors, and how far it reaches beyond them."""

from dataclasses import dataclass

from ostrya.capacity.chips import Slice, find_slice
from ostrya.capacity.estimate import fitted_generation
from ostrya.capacity.published import POINTS, Engine, Use


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The points that an engine's factors for a generation were fitted to."""

    generation: str
    num_chips: tuple[int, ...]
    """Of their slices, ascending."""
    min_requests: int
    """The smallest batch."""
    max_requests: int
    """The largest."""

    def warning(self, where: Slice, num_requests: int) -> str | None:
        """One line, for an estimate beyond the generation, the slices or the batches of those points."""
        if where.chip.name != self.generation:
            return f"Nothing published for {where.chip.name}: factors are carried over from {self.generation}."
        if where.num_chips in self.num_chips and self.min_requests <= num_requests <= self.max_requests:
            return None
        slices = " and ".join(f"{size}-chip" for size in self.num_chips)
        reach = f"{slices} slices, batch {self.min_requests} to {self.max_requests:,}"
        return f"Warning: factors fitted on {reach}; the estimate reaches beyond."


def fitted(engine: Engine, generation: str) -> Fitted:
    """What is behind the estimates for a generation."""
    source = fitted_generation(engine, generation)
    points = [point for point in POINTS if (point.use, point.engine, point.generation) == (Use.FITTED, engine, source)]
    return Fitted(
        generation=source,
        num_chips=tuple(sorted({find_slice(point.slice_name).num_chips for point in points})),
        min_requests=min(point.num_requests for point in points),
        max_requests=max(point.num_requests for point in points),
    )
