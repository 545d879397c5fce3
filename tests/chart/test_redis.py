"""The bundled Redis as its container would run it: the rendered shell command and probes, with a real Valkey.

Only its directory, its port and its address are this machine's. The probes call valkey-cli, which the package with the
server has not; redis-cli stands in for it, which takes the same words and the same variable.
"""

import asyncio
import os
import shutil
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.chart.commands import command_of, options
from tests.chart.objects import WorkloadSpec
from tests.chart.pods import Pod, pods
from tests.chart.render import Render, preset, render
from tests.fakes.redis_server import binary, free_port, require

SHOWN_PORT = "6379"
ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The container on this machine."""

    pod: Pod
    folder: Path
    programs: Path
    port: int
    env: Mapping[str, str]
    process: asyncio.subprocess.Process
    password: str
    """What routers and workers put into their URL."""

    def client(self, password: str | None) -> Redis:
        # RESP2: with RESP3 the first word is HELLO, which has a message of its own.
        return Redis(
            host="127.0.0.1",
            port=self.port,
            password=password,
            socket_timeout=5,
            decode_responses=True,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
        )

    def probe(self, name: str, **env: str) -> int:
        """Exit code of the rendered probe."""
        action = self.pod.main.probes[name].exec
        assert action is not None
        done = subprocess.run(action.command, env={**self.env, **env}, capture_output=True, timeout=10, check=False)
        return done.returncode


def redis_url(shown: Render, pod: Pod) -> str:
    return str(options(command_of(shown, pod, pod.main))["redis_url"])


def programs(folder: Path, port: int) -> Path:
    """A directory with a valkey-server that leaves its arguments, and a valkey-cli that knows this machine's port."""
    cli = shutil.which("redis-cli")
    require("valkey")
    if cli is None:
        skip_or_fail = pytest.fail if os.environ.get("OSTRYA_REQUIRE_ALL") == "1" else pytest.skip
        skip_or_fail("no redis-cli on this machine")
    folder.mkdir()
    scripts = {
        "valkey-server": f"""printf '%s\\n' "$@" > {folder / ARGUMENTS}\nexec {binary("valkey")} "$@"\n""",
        "valkey-cli": f'exec {cli} -p {port} "$@"\n',
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Here]:
    shown = render({"redis": {"bundled": {"maxMemory": "64mb"}}})
    (pod,) = pods(shown, "redis")
    (router,) = pods(shown, "router")
    password = urlsplit(redis_url(shown, router)).password
    assert password
    port, folder = free_port(), tmp_path / "data"
    folder.mkdir()
    found = programs(tmp_path / "bin", port)
    env = dict(command_of(shown, pod, pod.main).env) | {"PATH": f"{found}:/usr/bin:/bin"}
    shell, flags, script = pod.main.command
    # The root file system is read-only.
    assert [one.mount_path for one in pod.main.volume_mounts if not one.read_only] == ["/data"]
    assert script.count(SHOWN_PORT) == 1
    script = script.replace("/data", str(folder)).replace(SHOWN_PORT, str(port)).rstrip()
    process = await asyncio.create_subprocess_exec(
        shell, flags, f"{script} --bind 127.0.0.1", env=env, stdout=asyncio.subprocess.DEVNULL
    )
    started = Here(pod=pod, folder=folder, programs=found, port=port, env=env, process=process, password=password)
    try:
        await listens(started)
        yield started
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 10)


async def listens(started: Here) -> None:
    deadline = time.monotonic() + 10
    while True:
        assert started.process.returncode is None, f"the container ended with {started.process.returncode}"
        assert time.monotonic() < deadline, "no Valkey within 10 s"
        client = started.client(started.password)
        try:
            await client.ping()
        except RedisConnectionError as error:
            if isinstance(error, AuthenticationError):
                raise
            await asyncio.sleep(0.01)  # a real process starts; nothing to wait on but its port
        else:
            return
        finally:
            await client.aclose()


async def test_it_answers_with_the_password_of_the_secret_alone(here: Here) -> None:
    async with here.client(here.password) as client:
        assert await client.ping()
    async with here.client(None) as client:
        with pytest.raises(AuthenticationError, match="Authentication required"):
            await client.ping()
    async with here.client("wrong") as client:
        with pytest.raises(RedisError, match="invalid username-password pair"):
            await client.ping()


async def test_it_keeps_to_the_memory_of_the_values_and_to_nothing_on_disk(here: Here) -> None:
    async with here.client(here.password) as client:
        config = await client.config_get("maxmemory", "maxmemory-policy", "save", "appendonly", "dir", "port")
    assert config == {
        "maxmemory": str(64 * 2**20),
        # ARCHITECTURE: leases are written every second, journals of dead workers are not, so those go first.
        "maxmemory-policy": "volatile-lru",
        "save": "",
        "appendonly": "no",
        "dir": str(here.folder),
        "port": str(here.port),
    }


async def test_nobody_else_on_the_node_reads_the_password(here: Here) -> None:
    # Asked of who started it: a running Valkey hides its own arguments.
    arguments = (here.programs / ARGUMENTS).read_text()
    assert str(here.port) in arguments
    assert here.password not in arguments
    for path in here.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


async def test_the_rendered_probes_pass_while_it_answers_and_fail_when_it_does_not(here: Here) -> None:
    assert here.pod.main.probes.keys() >= {"readiness", "liveness"}
    for name in here.pod.main.probes:
        assert here.probe(name) == 0, f"{name} probe of a good Redis fails"
        assert here.probe(name, REDISCLI_AUTH="wrong") != 0, f"{name} probe passes without an answer"
    # The shell made way for the server: SIGTERM of the kubelet arrives.
    here.process.terminate()
    assert await asyncio.wait_for(here.process.wait(), 10) == 0
    for name in here.pod.main.probes:
        assert here.probe(name) != 0, f"{name} probe of a dead Redis passes"


def test_a_new_redis_starts_when_the_old_one_is_gone() -> None:
    """Two would hold two truths."""
    (redis,) = pods(preset("defaults"), "redis")
    spec = redis.owner.spec(WorkloadSpec)
    assert (spec.replicas, spec.strategy.type) == (1, "Recreate")


def test_the_ca_of_an_external_redis_lies_where_its_url_says(shown: Render) -> None:
    redis = shown.values["redis"]
    assert isinstance(redis, dict)
    external = redis["external"]
    for pod in (*pods(shown, "router"), *pods(shown, "worker")):
        named = parse_qs(urlsplit(redis_url(shown, pod)).query).get("ssl_ca_certs", [])
        if not external["caSecret"]:
            assert named == []
            continue
        (certificate,) = map(Path, named)
        (volume,) = [one.name for one in pod.main.volume_mounts if one.mount_path == str(certificate.parent)]
        (source,) = [one["secret"] for one in pod.spec.volumes if one["name"] == volume]
        item = {"key": external["caKey"], "path": certificate.name}
        assert source == {"secretName": external["caSecret"], "items": [item]}
