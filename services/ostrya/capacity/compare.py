"""One model on every slice: what fits where, and how fast it would be."""

from collections.abc import Sequence
from dataclasses import dataclass

from ostrya.capacity.chips import SLICES, Slice
from ostrya.capacity.facts import Decoding, Prompt, Setup
from ostrya.capacity.figures import Asked
from ostrya.capacity.memory import fit
from ostrya.capacity.report import check
from ostrya.capacity.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One slice."""

    slice_name: str
    num_chips: int
    num_hosts: int
    missing_bytes: float
    """0 where the batch and context asked for fit."""
    max_requests: int
    """At the context asked for."""
    decoding: Decoding | None
    """At the batch asked for; None where it does not fit."""
    largest: Decoding | None
    """At max_requests."""
    prompt: Prompt | None


def compare(spec: ModelSpec, setup: Setup, slices: Sequence[Slice] = SLICES) -> tuple[Row, ...]:
    """In the order of `slices`. ConfigError for what makes no sense on any of them."""
    check(spec, setup)
    return tuple(_row(spec, where, setup) for where in slices)


def _row(spec: ModelSpec, where: Slice, setup: Setup) -> Row:
    room = fit(
        spec,
        where,
        context_tokens=setup.context_tokens,
        num_requests=setup.num_requests,
        num_draft_tokens=setup.num_draft_tokens,
        chunk_tokens=setup.chunk_tokens,
        placement=setup.placement,
    )
    asked = Asked(spec=spec, where=where, setup=setup)
    return Row(
        slice_name=where.name,
        num_chips=where.num_chips,
        num_hosts=where.num_hosts,
        missing_bytes=max(0.0, -room.free_bytes),
        max_requests=room.max_requests,
        decoding=asked.decoding(setup.num_requests) if room.fits else None,
        largest=asked.decoding(room.max_requests) if room.max_requests else None,
        prompt=asked.prompt() if room.fits else None,
    )
