"""A stand-in for a ClusterIP Service: TCP to one of the ready endpoints, chosen once a connection.

As kube-proxy does, it forgets an endpoint for new connections only, a moment after it left; what is open stays open.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress

PROPAGATION_S = 0.3
"""From a change of the endpoints to the last node's kube-proxy."""
_CONNECT_TRIES = 3
"""A client's kernel tries a refused connection again; so does this, at the next endpoint."""


class Service:
    """`async with Service(endpoints) as service`: then `service.target` leads to one of `endpoints()`."""

    def __init__(self, endpoints: Callable[[], Sequence[str]]) -> None:
        self._endpoints = endpoints
        self._seen: tuple[str, ...] = ()
        self._has_seen = asyncio.Event()
        self._turn = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_refused = 0
        """Connections for which there was no endpoint."""

    async def __aenter__(self) -> "Service":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.target = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._watching = asyncio.create_task(self._watch())
        await self._has_seen.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in {self._watching, *self._tasks}:
            task.cancel()
        await asyncio.gather(self._watching, *self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            endpoints = tuple(self._endpoints())
            await asyncio.sleep(PROPAGATION_S)  # this is the delay that is being imitated
            self._seen = endpoints
            self._has_seen.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            with suppress(OSError):
                await self._forward(reader, writer)
        finally:
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(_CONNECT_TRIES):
            if not self._seen:
                break
            host, _, port = self._seen[next(self._turn) % len(self._seen)].rpartition(":")
            try:
                far_reader, far_writer = await asyncio.open_connection(host, int(port))
            except OSError:
                continue
            try:
                await _either_way(reader, writer, far_reader, far_writer)
            finally:
                far_writer.close()
            return
        self.num_refused += 1


async def _either_way(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Until one side ends; then both have."""
    ways = {asyncio.create_task(_copy(reader, far_writer)), asyncio.create_task(_copy(far_reader, writer))}
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
