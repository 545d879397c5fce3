"""Rank 0's end of one connection to a follower. The loop of leader.py reads it; any thread may send.

What is sent goes to the kernel at once, on the thread that sends: to hand it to the loop's thread would cost up to five
milliseconds, for which the engine's thread keeps Python's lock. The loop sends what the kernel does not take.
"""

import asyncio
import contextlib
import socket
from threading import Lock

from ostrya.engine import slice_wire as wire


class Link:
    """Use and close it in the loop's thread; only `send` is for all."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._loop = sock, loop
        self._sending = Lock()
        self._unsent = bytearray()
        self._is_open = True

    @property
    def num_unsent_bytes(self) -> int:
        """What the follower has not taken yet, beyond what the kernel keeps for it."""
        return len(self._unsent)

    @property
    def source(self) -> str:
        """Who that is, for people."""
        with contextlib.suppress(OSError):
            address = self._sock.getpeername()
            return f"{address[0]}:{address[1]}"
        return "nowhere"

    def send(self, frame: bytes) -> None:
        """Never blocks. What a broken connection does not take is dropped: who reads it learns why."""
        with self._sending:
            if not self._is_open:
                return
            if not self._unsent:
                frame = frame[self._sent(frame) :]
            if frame:
                self._unsent += frame
                self._loop.call_soon_threadsafe(self._await_room)

    async def read(self) -> wire.ToLeader:
        """The next message. EOFError or OSError when the follower is gone, ValueError when it speaks otherwise."""
        return await wire.read(self._exactly)

    def close(self) -> None:
        with self._sending:
            self._is_open = False
            self._loop.remove_writer(self._sock)
            self._sock.close()

    async def _exactly(self, num_bytes: int) -> bytes:
        parts = []
        while num_bytes:
            part = await self._loop.sock_recv(self._sock, min(num_bytes, 1 << 16))
            if not part:
                raise EOFError("the connection was closed")
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)

    def _sent(self, frame: bytes | bytearray) -> int:
        """How much of it the kernel took; all of it where the connection is broken."""
        try:
            return self._sock.send(frame)
        except BlockingIOError:
            return 0
        except OSError:
            return len(frame)

    def _await_room(self) -> None:
        with self._sending:
            if self._is_open:
                self._loop.add_writer(self._sock, self._flush)

    def _flush(self) -> None:
        with self._sending:
            if self._is_open:
                del self._unsent[: self._sent(self._unsent)]
                if not self._unsent:
                    self._loop.remove_writer(self._sock)
