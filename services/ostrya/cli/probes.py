"""Asks a running install what `ostrya doctor` wants to know. Every probe is bounded and fails into its own facts.

Nothing is changed anywhere; passwords go where they belong and into no fact.
"""

import asyncio
import socket
import ssl
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ostrya.api.v1 import admin_pb2, admin_pb2_grpc
from ostrya.cli import prometheus
from ostrya.cli.diagnosis import certificate
from ostrya.cli.diagnosis.facts import (
    Clock,
    Dialled,
    Facts,
    Memory,
    PoolRows,
    PrometheusFacts,
    RedisFacts,
    RouterFacts,
    Standing,
    TlsFacts,
)
from ostrya.cli.dialling import dial
from ostrya.cli.prometheus import shown
from ostrya.client.attempts import CHANNEL_OPTIONS, failure
from ostrya.errors import StateUnavailable, Unreadable
from ostrya.state import board, lease, members
from ostrya.state.connection import Connection
from ostrya.state.rows import Kind, Rejects

F = TypeVar("F", RouterFacts, RedisFacts, PrometheusFacts, TlsFacts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What to look at."""

    targets: tuple[str, ...]
    redis_url: str = ""
    """Empty = not; so below."""
    pool: str = ""
    """Of the rows in Redis; empty = what the routers serve."""
    prometheus: str = ""
    tls: tuple[str, ...] = ()
    timeout_s: float = 5.0


async def ask(questions: Questions) -> Facts:
    """Everything at once, then the workers that it told of; takes little longer than two timeouts."""
    timeout_s = questions.timeout_s
    asking = asyncio.create_task(_routers(questions.targets, timeout_s))
    scraped, redis, greeted = await asyncio.gather(
        _prometheus(questions.prometheus, timeout_s),
        _redis(questions.redis_url, questions.pool, asking, timeout_s),
        asyncio.gather(*(_tls(endpoint, timeout_s) for endpoint in _tls_endpoints(questions))),
    )
    routers = tuple(await asking)
    return Facts(
        now_s=time.time(),
        routers=routers,
        redis=redis,
        prometheus=scraped,
        tls=tuple(greeted),
        workers=await _workers(routers, redis, timeout_s),
    )


async def _workers(routers: Sequence[RouterFacts], redis: RedisFacts | None, timeout_s: float) -> dict[str, Dialled]:
    known = {replica.address for router in routers for replica in router.replicas.values()}
    for rows in redis.pools.values() if redis else ():
        known |= {member.address for member in rows.members.values()}
    addresses = sorted(known)
    return dict(zip(addresses, await asyncio.gather(*(dial(one, timeout_s) for one in addresses)), strict=True))


async def _bounded(work: Awaitable[F], broken: Callable[[str], F], timeout_s: float) -> F:
    """The probe's facts, or facts that say why there are none; never an exception."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        return broken(f"no answer within {timeout_s:g} s")
    except Exception as error:
        return broken(str(error) or type(error).__name__)


async def _routers(targets: Sequence[str], timeout_s: float) -> list[RouterFacts]:
    found = await asyncio.gather(*(_addresses(target, timeout_s) for target in targets))
    unique = list(dict.fromkeys(address for addresses in found for address in addresses))
    return await asyncio.gather(*(_router(address, timeout_s) for address in unique))


async def _addresses(target: str, timeout_s: float) -> list[str]:
    """Every address behind a name that has several, as a headless Service has: each router is asked for itself."""
    host, _, port = target.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return [target]  # dialling it says what is wrong
    # With both families every router is there twice.
    family = min(family for family, *_ in found)
    hosts = sorted({str(address[0]) for kind, *_, address in found if kind == family})
    names = [f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts]
    return names if len(names) > 1 else [target]


async def _router(target: str, timeout_s: float) -> RouterFacts:
    asked = _ask_router(target, timeout_s)
    return await _bounded(asked, lambda error: RouterFacts(target=target, error=error), timeout_s + 0.5)


async def _ask_router(target: str, timeout_s: float) -> RouterFacts:
    async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        admin: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)  # type: ignore[attr-defined]
            seen = await admin.ListReplicas(admin_pb2.ListReplicasRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            reason = str(failure(error, target)).removeprefix(f"{target} cannot be reached: ")
            raise OSError(reason.removesuffix("]")) from error  # "[C-ares …: Domain name not found]", innermost part
        status, clock = await _status(admin, timeout_s)
    return RouterFacts(
        target=target,
        is_serving=answer.status == health_pb2.HealthCheckResponse.SERVING,
        status=status,
        replicas={one.worker_id: one for one in seen.replicas},
        level=seen.level,
        clock=clock,
    )


async def _status(
    admin: "admin_pb2_grpc.AdminServiceAsyncStub", timeout_s: float
) -> tuple[admin_pb2.GetStatusResponse | None, Clock | None]:
    sent_s, began_s = time.time(), time.monotonic()
    try:
        status = await admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        return None, None
    return status, _clock(status.time_s, sent_s, began_s)


async def _prometheus(url: str, timeout_s: float) -> PrometheusFacts | None:
    if not url:
        return None
    asked = prometheus.ask(url, timeout_s)
    return await _bounded(asked, lambda error: PrometheusFacts(where=shown(url), error=error), timeout_s)


async def _redis(
    url: str, pool: str, routers: "asyncio.Task[list[RouterFacts]]", timeout_s: float
) -> RedisFacts | None:
    """What Redis says of itself, and of the pools that the routers turn out to serve."""
    if not url:
        return None
    connection = Connection(url)
    try:
        found = RedisFacts(where=shown(url))
        found = await _bounded(_ask_redis(connection, found.where), partial(_no_redis, found), timeout_s)
        if found.error:
            return found
        pools = {pool} if pool else {router.pool for router in await routers if router.pool} or {"default"}
        return await _bounded(_ask_rows(connection, found, sorted(pools)), partial(_no_redis, found), timeout_s)
    finally:
        await connection.close()


def _no_redis(found: RedisFacts, error: str) -> RedisFacts:
    """state/connection.py names the client's exception first, and a timeout has no words of its own."""
    words = error.removeprefix("Redis: ")
    return replace(found, error="no answer in time" if words == "TimeoutError: " else words)


async def _ask_redis(connection: Connection, where: str) -> RedisFacts:
    await connection.call("PING")
    began_s = time.monotonic()
    await connection.call("PING")  # the first one paid for the connection
    latency_s = time.monotonic() - began_s
    sent_s, began_s = time.time(), time.monotonic()
    seconds, microseconds = cast("tuple[int, int]", await connection.call("TIME"))
    clock = _clock(seconds + microseconds / 1e6, sent_s, began_s)
    found = RedisFacts(where=where, latency_s=latency_s, clock=clock)
    try:
        info = cast("Mapping[str, object]", await connection.call("INFO"))
    except StateUnavailable:
        return found  # an ACL may forbid it
    return replace(found, memory=_memory(info), standing=_standing(info))


def _standing(info: Mapping[str, object]) -> Standing:
    is_replica = info.get("role") == "slave" and str(info.get("slave_read_only")) == "1"
    return Standing(
        master=f"{info.get('master_host')}:{info.get('master_port')}" if is_replica else "",
        # Only there if it wants any.
        lacks_replicas=str(info.get("min_slaves_good_slaves", 1)) == "0",
        is_disk_broken="err" in (info.get("rdb_last_bgsave_status"), info.get("aof_last_write_status")),
    )


def _memory(info: Mapping[str, object]) -> Memory:
    return Memory(
        used_bytes=int(str(info["used_memory"])),
        max_bytes=int(str(info["maxmemory"])),
        policy=str(info["maxmemory_policy"]),
        evicted_keys=int(str(info["evicted_keys"])),
    )


async def _ask_rows(connection: Connection, found: RedisFacts, pools: Sequence[str]) -> RedisFacts:
    rows = {}
    for pool in pools:
        rejects = Rejects()
        try:
            there = await members.read(connection, pool, rejects=rejects)
            await board.read(connection, pool, first=there, rejects=rejects)
        except Unreadable as error:
            rejects.add(Kind.MEMBER, "members or load", error)
            there = {}
        leases = await lease.remaining_s(connection, pool, list(there))
        rows[pool] = PoolRows(members=there, leases=leases, unreadable=rejects.named_rows())
    return replace(found, pools=rows)


def _tls_endpoints(questions: Questions) -> list[str]:
    """Those asked for, and those that the URLs dial."""
    urls = {"rediss": (questions.redis_url, 6379), "https": (questions.prometheus, 443)}
    dialled = [
        _endpoint(urllib.parse.urlsplit(url), port) for scheme, (url, port) in urls.items() if url.startswith(scheme)
    ]
    return list(dict.fromkeys([*questions.tls, *dialled]))


def _endpoint(parts: urllib.parse.SplitResult, port: int) -> str:
    host = parts.hostname or ""
    return f"[{host}]:{parts.port or port}" if ":" in host else f"{host}:{parts.port or port}"


async def _tls(endpoint: str, timeout_s: float) -> TlsFacts:
    host = endpoint.rpartition(":")[0].strip("[]")
    asked = _greet(endpoint, host)
    return await _bounded(asked, lambda error: TlsFacts(endpoint=endpoint, host=host, error=error), timeout_s)


async def _greet(endpoint: str, host: str) -> TlsFacts:
    # Nothing is sent, and what is wrong with the certificate is for us to say.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    port = int(endpoint.rpartition(":")[2])
    _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
    try:
        session = cast("ssl.SSLObject", writer.get_extra_info("ssl_object"))
        der = session.getpeercert(binary_form=True)
    finally:
        writer.close()
    return TlsFacts(endpoint=endpoint, host=host, certificate=certificate.read(der or b""))


def _clock(theirs_s: float, sent_s: float, began_s: float) -> Clock:
    """Their clock against the middle of the round trip."""
    half_s = (time.monotonic() - began_s) / 2
    return Clock(theirs_s - (sent_s + half_s), half_s)
