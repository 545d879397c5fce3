"""Which of a replica's processes this is. Pure: told by whoever starts a process, read by backends and replicas.py."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The processes that compute one model together; rank 0 schedules."""

    rank: int = 0
    size: int = 1
    rendezvous: str = ""
    """host:port where rank 0 lets the others find each other for collectives; empty when it is alone."""


ALONE = World()
