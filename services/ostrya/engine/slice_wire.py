"""What rank 0 and its followers say to each other, over one TCP connection each.

A frame is its length and its kind, u32 little-endian, and either a msgpack message or a plan (plan_codec.py). Rank 0
sends Challenge; a follower Hello; rank 0 Welcome or Refused, and once all are there Begin, then WarmUp, plans, and Ping
when there is nothing else. A follower sends Loaded, Warm, and Beat all the time, or Failed as its last.
"""

import socket
import struct
from collections.abc import Awaitable, Callable

import msgspec

from ostrya.engine.handshake import Identity

PROTOCOL = 1
HEAD = struct.Struct("<2I")
CONTROL, PLAN = 0, 1
MAX_CONTROL_BYTES = 4 << 20
"""A Hello names every file of the weights."""
MAX_PLAN_BYTES = 512 << 20
"""256 rows with penalties over 128k tokens each come near it; anything else is kB."""

BEAT_S = 0.2
"""A follower says something at least so often."""
PING_S = 0.5
"""So does rank 0."""


class Challenge(msgspec.Struct, frozen=True, tag=True):
    protocol: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag=True):
    protocol: int
    proof: bytes
    host: int
    local_rank: int
    name: str
    """Of the host, and the process there, for people."""
    identity: Identity


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The place is yours; others are awaited."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    why: str


class Begin(msgspec.Struct, frozen=True, tag=True):
    """All are there: load."""

    rendezvous: str


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    buckets: list[tuple[int, int, int]]


class Ping(msgspec.Struct, frozen=True, tag=True):
    pass


class Loaded(msgspec.Struct, frozen=True, tag=True):
    pass


class Warm(msgspec.Struct, frozen=True, tag=True):
    pass


class Beat(msgspec.Struct, frozen=True, tag=True):
    """How far a follower is."""

    step: int
    """The last that it has done; the first is 1."""
    checksum: int
    """Over the tokens of all steps so far: equal on all ranks."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It ends; one line."""

    why: str


ToFollower = Challenge | Welcome | Refused | Begin | WarmUp | Ping
ToLeader = Hello | Loaded | Warm | Beat | Failed

_encoder = msgspec.msgpack.Encoder()
_to_follower = msgspec.msgpack.Decoder(ToFollower)
_to_leader = msgspec.msgpack.Decoder(ToLeader)


def frame(message: ToFollower | ToLeader) -> bytes:
    raw = _encoder.encode(message)
    return HEAD.pack(len(raw), CONTROL) + raw


def plan_frame(plan: bytes) -> bytes:
    """ValueError when it is larger than followers take."""
    if len(plan) > MAX_PLAN_BYTES:
        raise ValueError(f"a plan has {len(plan)} bytes; the limit is {MAX_PLAN_BYTES}")
    return HEAD.pack(len(plan), PLAN) + plan


async def read(exactly: Callable[[int], Awaitable[bytes]]) -> ToLeader:
    """Rank 0's next message, of as many bytes as are asked for one by one. ValueError when it is none."""
    size, kind = HEAD.unpack(await exactly(HEAD.size))
    if kind != CONTROL or size > MAX_CONTROL_BYTES:
        raise ValueError(
            f"a frame of kind {kind} with {size} bytes; allowed: kind {CONTROL}, {MAX_CONTROL_BYTES} bytes"
        )
    raw = await exactly(size)
    try:
        return _to_leader.decode(raw)
    except msgspec.DecodeError as error:
        raise ValueError(f"a message that is none: {error}") from error


def receive(sock: socket.socket) -> "ToFollower | bytearray":
    """A follower's next message, or plan. Blocks; EOFError or OSError when rank 0 is gone, TimeoutError when it is
    silent for the socket's timeout, ValueError when it speaks otherwise."""
    size, kind = HEAD.unpack(_exactly(sock, HEAD.size))
    if kind == PLAN and size <= MAX_PLAN_BYTES:
        return _exactly(sock, size)
    if kind != CONTROL or size > MAX_CONTROL_BYTES:
        raise ValueError(f"a frame of kind {kind} with {size} bytes")
    raw = _exactly(sock, size)
    try:
        return _to_follower.decode(raw)
    except msgspec.DecodeError as error:
        raise ValueError(f"a message that is none: {error}") from error


def _exactly(sock: socket.socket, num_bytes: int) -> bytearray:
    raw = bytearray(num_bytes)
    view = memoryview(raw)
    while view:
        num_received = sock.recv_into(view)
        if not num_received:
            raise EOFError("the connection was closed")
        view = view[num_received:]
    return raw
