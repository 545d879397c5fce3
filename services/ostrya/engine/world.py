"""Which processes run one replica, and which of them this is. Pure: no torch, no socket.

A replica is a world of ranks 0 to N - 1. Rank 0 plans; every other rank replays its plans (replicas.py, follower.py).
Hosts have equally many ranks, one after another: host h of H begins with rank h * N / H.
"""

from dataclasses import dataclass

import msgspec

from ostrya.engine.config import EngineConfig
from ostrya.errors import ConfigError

_RANK_PER_DEVICE = ("cpu", "torchtpu")
"""Backends with one process a device; the others are one process, on one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a runner must know to meet the others."""

    rank: int = 0
    size: int = 1
    rendezvous: str = ""
    """host:port on host 0 where collectives may meet: rank 0 listens, the others dial. Empty when alone."""
    num_hosts: int = 1

    @property
    def local_rank(self) -> int:
        """Among the ranks of this host."""
        return self.rank % (self.size // self.num_hosts)


ALONE = World()


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of a replica, as one of them sees them."""

    host: int = 0
    """Which of them this is; host 0 leads."""
    num_hosts: int = 1
    leader: str = "127.0.0.1"
    """Name or address of host 0 among its hosts; only there it listens."""
    port: int = 0
    """Where host 0 awaits the others, and the next one is the rendezvous of collectives; 0 = any free ports."""
    names: tuple[str, ...] = ()
    """Of the hosts, by index, for people; may be empty."""
    secret: str = ""
    """What all hosts know and a stranger does not; may be empty."""
    join_timeout_s: float = 300.0
    """How long host 0 waits for the others."""

    def named(self, host: int) -> str:
        """A host, for people: "host 2 of 4 (w-2)"."""
        name = f" ({self.names[host]})" if host < len(self.names) else ""
        return f"host {host} of {self.num_hosts}{name}"


ONE_HOST = Slice()


def ranks_per_host(config: EngineConfig, num_hosts: int) -> int:
    """Processes on each host. ConfigError if the devices cannot be shared out, or the backend takes one host alone."""
    if config.backend not in _RANK_PER_DEVICE:
        if num_hosts > 1:
            raise ConfigError(
                [f"hosts are {num_hosts}; backend {config.backend} runs on one: take one host, or backend torchtpu"]
            )
        return 1
    if config.tensor_parallel % num_hosts:
        raise ConfigError(
            [f"tensor_parallel is {config.tensor_parallel}; it must be a multiple of the number of hosts, {num_hosts}"]
        )
    return config.tensor_parallel // num_hosts
