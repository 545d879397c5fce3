"""What a worker and its engine process say to each other: msgpack frames with a length in front, over one socket pair.

The parent sends Start and Vocabulary, then Submit and Abort; the child sends Waiting and Log until Ready or Fatal, then
Report and Refused, and Fatal as its last word when it knows why it ends. Closing the socket ends both.
"""

import socket
import struct
from asyncio import StreamReader

import msgspec

from ostrya.engine.config import EngineConfig
from ostrya.engine.types import EngineInfo, EngineRequest, RequestId, StepReport
from ostrya.engine.world import ONE_HOST, Slice

_LENGTH = struct.Struct(">I")


class Start(msgspec.Struct, frozen=True, tag=True):
    """First frame: what to load. `factory` is the "module:function" of a RunnerFactory (backends/base.py)."""

    config: EngineConfig
    factory: str
    slice_: Slice = ONE_HOST
    """As host 0 sees it."""


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """Second frame, while the child loads: what each token spells, for grammars. Without any, they are refused."""

    tokens: list[bytes]
    """By id; empty for special tokens."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: RequestId


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Why the child is not ready yet, for the log."""

    words: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and every bucket is compiled."""

    info: EngineInfo


class Log(msgspec.Struct, frozen=True, tag=True):
    """A line for the parent's log; only before Ready."""

    logger: str
    level: int
    message: str
    fields: dict[str, str | float]


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served, or not any more; one line. The child exits."""

    message: str


class Report(msgspec.Struct, frozen=True, tag=True):
    """After each step, and at least every HEARTBEAT_S."""

    report: StepReport


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A submitted request could never finish; the fields of InvalidRequest."""

    request_id: RequestId
    field: str
    value: str
    allowed: str


ToChild = Start | Vocabulary | Submit | Abort
ToParent = Waiting | Log | Ready | Fatal | Report | Refused

HEARTBEAT_S = 0.2

_encoder = msgspec.msgpack.Encoder()
_to_child = msgspec.msgpack.Decoder(ToChild)
_to_parent = msgspec.msgpack.Decoder(ToParent)


def frame(message: ToChild | ToParent) -> bytes:
    """One message with its length, u32 big-endian, in front."""
    raw = _encoder.encode(message)
    return _LENGTH.pack(len(raw)) + raw


def receive(sock: socket.socket) -> ToChild:
    """The child's next message. Blocks; EOFError when the parent is gone."""
    return _to_child.decode(_receive_exactly(sock, _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))[0]))


async def read(reader: StreamReader) -> ToParent:
    """The parent's next message. EOFError (as IncompleteReadError) when the child is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _to_parent.decode(await reader.readexactly(length))


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    raw = bytearray(num_bytes)
    view = memoryview(raw)
    while view:
        num_received = sock.recv_into(view)
        if not num_received:
            raise EOFError("the parent closed the socket")
        view = view[num_received:]
    return bytes(raw)
