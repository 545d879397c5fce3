"""A name that can be pointed elsewhere: a TCP relay whose target changes for new connections, while old ones stay.

As a Service or a DNS name in front of a failover does. `async with Switch(port) as switch` listens on `switch.port`.
"""

import asyncio
from contextlib import suppress


class Switch:
    """Relays each connection to `target` as it is when the connection comes; None = nobody answers there."""

    def __init__(self, target: int | None) -> None:
        self.target = target
        self.port = 0
        self.num_connections = 0
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """For Redis clients."""
        return f"redis://127.0.0.1:{self.port}/0"

    async def __aenter__(self) -> "Switch":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()
        await self._server.wait_closed()

    async def cut(self) -> None:
        """Breaks every connection; new ones go to `target`."""
        relays = list(self._relays)
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = asyncio.create_task(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if self.target is None:
                return
            self.num_connections += 1
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
            writers.append(back)
            ways = [asyncio.create_task(_pipe(reader, back)), asyncio.create_task(_pipe(there, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            return
        finally:
            for one in writers:
                one.close()
            for one in writers:
                with suppress(OSError):
                    await one.wait_closed()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
