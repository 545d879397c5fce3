"""Who may join a replica, who has, and who is missing. Decides and says; leader.py has the connections. Pure."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from ostrya.engine import slice_wire as wire
from ostrya.engine.handshake import Identity, differences, is_proof
from ostrya.engine.slice_link import Link
from ostrya.engine.world import Slice

Phase = Literal["joined", "loaded", "warm"]


@dataclass(slots=True, eq=False, kw_only=True)
class Peer:
    """A follower that has shown who it is."""

    rank: int
    name: str
    process: str
    link: Link
    reached: set[Phase] = field(default_factory=lambda: {"joined"})
    step: int = 0
    beats: deque[wire.Beat] = field(default_factory=deque)
    """Not yet compared."""
    silent_s: float = 0.0


class Joining:
    """One start of a replica."""

    def __init__(self, slice_: Slice, ours: Identity, *, per_host: int) -> None:
        self.peers: dict[int, Peer] = {}
        """By rank."""
        self.is_over = False
        """Nobody joins any more."""
        self.dropped = ""
        """The last that came and may not stay, and why: whoever waits for a host may want to know."""
        self.different = ""
        """Which host is not like us, and in what; no new start of it alone can mend that."""
        self._slice, self._ours, self._per_host = slice_, ours, per_host

    @property
    def size(self) -> int:
        """Ranks of the replica."""
        return self._per_host * self._slice.num_hosts

    @property
    def is_complete(self) -> bool:
        return len(self.peers) == self.size - 1

    def refusal(self, hello: wire.Hello, nonce: bytes) -> str:
        """Why this one may not join; empty if it may."""
        if not is_proof(hello.proof, self._slice.secret, nonce):
            return "its slice secret is not host 0's"
        if hello.protocol != wire.PROTOCOL:
            return self._differs(hello, [f"speaks version {hello.protocol} of the channel, host 0 {wire.PROTOCOL}"])
        if clauses := differences(hello.identity, self._ours):
            return self._differs(hello, clauses)
        rank = self._rank(hello)
        if not (0 <= hello.host < self._slice.num_hosts and 0 <= hello.local_rank < self._per_host and rank):
            return f"there is no place for host {hello.host}, process {hello.local_rank}"
        if rank in self.peers:
            return f"the place of {self._named(hello)} is taken by {self.peers[rank].process}"
        return "all places are taken" if self.is_over else ""

    def welcome(self, hello: wire.Hello, link: Link) -> Peer:
        """Gives the place to one that was not refused."""
        rank = self._rank(hello)
        peer = self.peers[rank] = Peer(rank=rank, name=self._named(hello), process=hello.name, link=link)
        return peer

    def leave(self, peer: Peer, why: str) -> None:
        """Before all are there: its place is free again."""
        if self.peers.get(peer.rank) is peer:
            del self.peers[peer.rank]
            self.dropped = f"{peer.name} joined and {why}"

    def missing(self, verb: str = "to join") -> str:
        """Who has not joined, host by host."""
        ranks = [rank for rank in range(1, self.size) if rank not in self.peers]
        names = ", ".join(self._slice.named(host) for host in dict.fromkeys(rank // self._per_host for rank in ranks))
        return f"{names} {verb}" + (f"; {self.dropped}" if self.dropped else "")

    def _rank(self, hello: wire.Hello) -> int:
        return hello.host * self._per_host + hello.local_rank

    def _differs(self, hello: wire.Hello, clauses: list[str]) -> str:
        self.different = f"{self._named(hello)} {'; '.join(clauses)}"
        return self.different

    def _named(self, hello: wire.Hello) -> str:
        host = self._slice.named(hello.host) if self._slice.names else f"{self._slice.named(hello.host)} ({hello.name})"
        if self._per_host == 1:
            return host
        rank = f"rank {self._rank(hello)}"
        return rank if self._slice.num_hosts == 1 else f"{rank} on {host}"
