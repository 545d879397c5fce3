"""What the router knows of its endpoints while the API server does everything that real ones do."""

import asyncio
import datetime
import json
import logging
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kubernetes.config import incluster_config

from ostrya.errors import ConfigError
from ostrya.router import cluster as cluster_module
from ostrya.router.cluster import Cluster
from ostrya.router.disruption import ACTIVE_LABEL, SCHEDULED_LABEL, TERMINATION_TAINT
from ostrya.router.settings import RouterSettings
from ostrya.router.types import Hold
from tests.fakes.certificates import make_certificate
from tests.fakes.kube_api import NODES, KubeApi, endpoint
from tests.fakes.redis_server import free_port
from tests.fakes.waiting import Stopwatch, until

HEALED_S = 10.0
"""The promise: no endpoint is wrong for longer, whatever a watch missed."""
NOW = 1_790_000_000.0


class Wall:
    """Unix time that a test moves."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def api() -> Iterator[KubeApi]:
    with KubeApi() as server:
        yield server


@asynccontextmanager
async def watching(
    url: str,
    *,
    namespace: str = "default",
    maintenance: bool = False,
    wall: Callable[[], float] = time.time,
    ca_file: Path | str = "",
    token_file: Path | str = "",
) -> AsyncIterator[Cluster]:
    """A cluster at work; afterwards its threads are gone."""
    settings = RouterSettings(
        discovery="kubernetes",
        kubernetes_service="workers",
        kubernetes_namespace=namespace,
        kubernetes_api=url,
        kubernetes_ca_file=str(ca_file),
        kubernetes_token_file=str(token_file),
        maintenance=maintenance,
    )
    made = Cluster(settings, changed=lambda: None, wall=wall)
    watchers = [watcher for watcher in (made._slices, made._nodes) if watcher is not None]
    made.start()
    try:
        yield made
    finally:
        watch = Stopwatch()
        await made.close()
        assert watch.seconds() < 1.0, "close waits for nobody"
    assert not any(watcher._thread.is_alive() for watcher in watchers)


def addresses(cluster: Cluster) -> set[str] | None:
    return None if cluster.endpoints is None else set(cluster.endpoints)


async def test_endpoints_are_listed_then_followed(api: KubeApi) -> None:
    api.put_slice("a", [endpoint("10.0.0.1")])
    api.put_slice("other", [endpoint("10.0.9.9")], service="other")
    api.put_slice("elsewhere", [endpoint("10.0.9.8")], namespace="elsewhere")
    async with watching(api.url) as cluster:
        assert cluster.endpoints is None
        await until(lambda: addresses(cluster) == {"10.0.0.1:50052"})
        await until(lambda: cluster.is_up)
        api.put_slice("b", [endpoint("10.0.0.2")], port=7000)
        assert await until(lambda: addresses(cluster) == {"10.0.0.1:50052", "10.0.0.2:7000"}) < 1.0
        api.put_slice("a", [endpoint("10.0.0.1", ready=False, serving=True, terminating=True)])
        assert await until(lambda: cluster.holds() == {"10.0.0.1:50052": (Hold.TERMINATING,)}) < 1.0
        api.put_slice("b", [endpoint("10.0.0.2", ready=False)], port=7000)
        await until(lambda: cluster.holds().get("10.0.0.2:7000") == (Hold.NOT_READY,))
        api.delete_slice("a")
        assert await until(lambda: addresses(cluster) == {"10.0.0.2:7000"}) < 1.0
        assert cluster.events == {"listed": 1, "reconnected": 0, "expired": 0, "failed": 0}
    watched = next(seen for seen in api.requests if seen.verb == "watch")
    assert watched.query["allowWatchBookmarks"].lower() == "true"
    assert int(watched.query["timeoutSeconds"]) <= 6
    assert int(watched.query["resourceVersion"]) > 0


async def test_an_empty_slice_comes_as_null(api: KubeApi) -> None:
    api.put_slice("a", None)
    async with watching(api.url) as cluster:
        await until(lambda: addresses(cluster) == set())


async def test_bookmarks_change_nothing(api: KubeApi) -> None:
    api.put_slice("a", [endpoint("10.0.0.1")])
    async with watching(api.url) as cluster:
        await until(lambda: cluster.is_up and api.num_watches == 1)
        api.bookmark()
        api.put_slice("b", [endpoint("10.0.0.2")])
        await until(lambda: len(addresses(cluster) or ()) == 2)
        assert cluster.events["reconnected"] == 0


def swallow(api: KubeApi) -> None:
    api.swallow_next()
    api.delete_slice("ghost")


def silence(api: KubeApi) -> None:
    api.go_silent()
    api.delete_slice("ghost")


def drop(api: KubeApi) -> None:
    api.swallow_next()
    api.delete_slice("ghost")
    api.drop_watches()


def truncate(api: KubeApi) -> None:
    api.swallow_next()
    api.delete_slice("ghost")
    api.drop_watches(truncated=True)


def expire(api: KubeApi) -> None:
    api.swallow_next()
    api.delete_slice("ghost")
    api.expire()


def expire_at_the_door(api: KubeApi) -> None:
    api.swallow_next()
    api.delete_slice("ghost")
    api.expire_next_watch()


def hang(api: KubeApi) -> None:
    """Nothing answers for three seconds."""
    api.go_silent(completely=True)
    api.delete_slice("ghost")
    threading.Timer(3.0, api.speak).start()


def restart(api: KubeApi) -> None:
    api.swallow_next()
    api.delete_slice("ghost")
    api.stop()
    api.start()


async def heals(fault: Callable[[KubeApi], None]) -> tuple[float, dict[str, int]]:
    """Seconds until a deleted endpoint is gone although its event did not come, and what the watch counted."""
    with KubeApi() as api:
        api.put_slice("a", [endpoint("10.0.0.1")])
        api.put_slice("ghost", [endpoint("10.0.0.2")])
        async with watching(api.url) as cluster:
            await until(lambda: cluster.is_up and api.num_watches == 1)
            await asyncio.to_thread(fault, api)
            seconds = await until(lambda: addresses(cluster) == {"10.0.0.1:50052"}, timeout_s=HEALED_S)
            await until(lambda: cluster.is_up and api.num_watches == 1)
            return seconds, dict(cluster.events)


async def test_whatever_a_watch_misses_is_made_good_within_ten_seconds() -> None:
    faults = (swallow, silence, drop, truncate, expire, expire_at_the_door, hang, restart)
    healed = dict(zip([fault.__name__ for fault in faults], await asyncio.gather(*map(heals, faults)), strict=True))
    print({name: round(seconds, 2) for name, (seconds, _) in healed.items()})
    assert max(seconds for seconds, _ in healed.values()) < HEALED_S
    counted = {name: {event for event, count in events.items() if count} for name, (_, events) in healed.items()}
    assert counted["swallow"] == {"listed"}
    for name in ("silence", "drop", "truncate"):
        assert counted[name] == {"listed", "reconnected"}, name
    assert counted["expire"] == {"listed", "expired"}
    assert counted["expire_at_the_door"] == {"listed", "reconnected", "expired"}


async def test_an_api_that_is_gone_freezes_what_is_known(api: KubeApi) -> None:
    api.put_slice("a", [endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False)])
    async with watching(api.url) as cluster:
        await until(lambda: cluster.is_up)
        known, holds = dict(cluster.endpoints or {}), cluster.holds()
        await asyncio.to_thread(api.stop)
        await until(lambda: not cluster.is_up and cluster.events["failed"] > 3)
        assert (cluster.endpoints, cluster.holds()) == (known, holds)
        api.put_slice("a", [endpoint("10.0.0.1")])
        api.start()
        assert await until(lambda: cluster.is_up and not cluster.holds(), timeout_s=HEALED_S) < 3.0


@pytest.mark.parametrize(
    ("verb", "status", "says"),
    [
        ("list", 403, "list: the API server answers 403"),
        ("watch", 403, "get, list, watch on endpointslices.discovery.k8s.io"),
        ("list", 401, "token"),
        ("list", 500, "500"),
    ],
)
async def test_a_refusal_is_said_once_and_forgotten_when_it_ends(
    api: KubeApi, caplog: pytest.LogCaptureFixture, verb: str, status: int, says: str
) -> None:
    caplog.set_level(logging.INFO, logger="ostrya.router.kubernetes")
    api.put_slice("a", [endpoint("10.0.0.1")])
    api.refuse("list" if verb == "list" else "watch", status)
    async with watching(api.url) as cluster:
        await until(lambda: cluster.events["failed"] >= 3)
        assert not cluster.is_up
        api.accept()
        await until(lambda: cluster.is_up)
        assert addresses(cluster) == {"10.0.0.1:50052"}
    lines = [(record.levelname, json.dumps(getattr(record, "fields", {}))) for record in caplog.records]
    assert [level for level, _ in lines] == ["WARNING", "INFO"]
    assert says in lines[0][1]
    assert "namespace default" in lines[0][1]


async def test_an_api_that_is_away_from_the_start_is_found_when_it_comes() -> None:
    api = KubeApi()
    api.port = free_port()
    async with watching(api.url) as cluster:
        await until(lambda: cluster.events["failed"] >= 2)
        assert (cluster.endpoints, cluster.is_up) == (None, False)
        with api:
            api.put_slice("a", [endpoint("10.0.0.1")])
            await until(lambda: addresses(cluster) == {"10.0.0.1:50052"})


async def test_nonsense_in_a_watch_is_a_broken_watch_and_in_a_list_a_failure(api: KubeApi) -> None:
    api.put_slice("a", [endpoint("10.0.0.1")])
    async with watching(api.url) as cluster:
        await until(lambda: cluster.is_up and api.num_watches == 1)
        api.put_slice("b", [{"addresses": "not a list"}])
        await until(lambda: cluster.events["reconnected"] == 1 and not cluster.is_up)
        assert addresses(cluster) == {"10.0.0.1:50052"}
        api.delete_slice("b")
        await until(lambda: cluster.is_up)


async def test_close_ends_a_silent_watch_at_once(api: KubeApi) -> None:
    async with watching(api.url) as cluster:
        await until(lambda: cluster.is_up and api.num_watches == 1)
        api.go_silent()


async def test_nodes_tell_what_is_coming(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    wall = Wall()
    api.put_slice("a", [endpoint("10.0.0.1", "n1"), endpoint("10.0.0.2", "n2"), endpoint("10.0.0.3")])
    api.put_node("n1", labels={SCHEDULED_LABEL: str(int(NOW + 700))})
    api.put_node("n2", labels={SCHEDULED_LABEL: "tomorrow"})
    async with watching(api.url, maintenance=True, wall=wall) as cluster:
        await until(lambda: len(cluster._outlooks) == 2)
        await until(lambda: len(addresses(cluster) or ()) == 3)
        assert cluster.holds() == {}
        wall.now += 100
        assert cluster.holds() == {"10.0.0.1:50052": (Hold.MAINTENANCE,)}
        api.put_node("n1", labels={ACTIVE_LABEL: "ONGOING"})
        await until(lambda: cluster.holds() == {"10.0.0.1:50052": (Hold.TERMINATION_IMPENDING,)})
        api.put_node("n1", taints=[TERMINATION_TAINT])
        api.put_node("n2", labels={SCHEDULED_LABEL: "tomorrow", "another": "label"})
        api.put_node("n3")
        await until(lambda: api.count("watch") >= 2)
        api.put_node("n1")
        await until(lambda: cluster.holds() == {})
    said = [record for record in caplog.records if "Unix seconds" in record.getMessage()]
    assert len(said) == 1
    assert {seen.path for seen in api.requests} >= {"/api/v1/nodes"}


async def test_nodes_are_not_asked_for_unless_told_to(api: KubeApi) -> None:
    async with watching(api.url) as cluster:
        await until(lambda: cluster.is_up)
        assert cluster.nodes is None
    assert all("endpointslices" in seen.path for seen in api.requests)


async def test_nodes_that_may_not_be_watched_are_told_apart_from_the_endpoints(api: KubeApi) -> None:
    api.put_slice("a", [endpoint("10.0.0.1", "n1")])
    api.put_node("n1", taints=[TERMINATION_TAINT])
    api.refuse("list", 403, path=NODES)
    async with watching(api.url, maintenance=True) as cluster:
        nodes = cluster.nodes
        assert nodes is not None
        await until(lambda: nodes.events["failed"] >= 2 and cluster.is_up)
        assert (nodes.is_up, cluster.events["failed"], cluster.holds()) == (False, 0, {})
        api.accept()
        await until(lambda: nodes.is_up and bool(cluster.holds()))
        assert nodes.events["listed"] >= 1
        api.refuse("watch", 403, path=NODES)
        await until(lambda: not nodes.is_up)
        assert cluster.is_up


def serving_tls(directory: Path) -> KubeApi:
    """An API server whose certificate is in ca.crt, which signed itself."""
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    made = make_certificate(["127.0.0.1"], not_before=now - day, not_after=now + day)
    (directory / "ca.crt").write_bytes(made.pem)
    (directory / "key.pem").write_bytes(made.key_pem)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(directory / "ca.crt", directory / "key.pem")
    return KubeApi(tls=tls)


class Pod:
    """What a pod's file system and environment say; the API server they name is ours, over TLS."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.token = directory / "token"
        self.token.write_text("first")
        (directory / "namespace").write_text("inference\n")
        self.api = serving_tls(directory)
        self.api.port = free_port()
        monkeypatch.setattr(cluster_module, "NAMESPACE_FILE", directory / "namespace")
        monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(self.token))
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(directory / "ca.crt"))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(self.api.port))


async def test_in_a_pod_its_own_account_namespace_and_authority_are_used_and_tokens_renewed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pod = Pod(tmp_path, monkeypatch)
    with pod.api as api:
        api.put_slice("a", [endpoint("10.0.0.1")], namespace="inference")
        async with watching("", namespace="") as cluster:
            await until(lambda: addresses(cluster) == {"10.0.0.1:50052"} and api.num_watches == 1)
            assert {seen.authorization for seen in api.requests} == {"bearer first"}
            # The client reads the file anew once a minute.
            pod.token.write_text("second")
            later = datetime.datetime.now() + datetime.timedelta(minutes=2)
            clock = type("Later", (datetime.datetime,), {"now": classmethod(lambda cls: later)})
            monkeypatch.setattr(incluster_config.datetime, "datetime", clock)
            api.drop_watches()
            await until(lambda: api.requests[-1].authorization == "bearer second")
            await until(lambda: cluster.is_up and api.num_watches == 1)
            # And `watching` sees that a read blocked in TLS is interrupted as well.


async def test_outside_of_a_pod_the_authority_and_the_token_come_from_files_and_a_new_token_is_used_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    with serving_tls(tmp_path) as api:
        api.put_slice("a", [endpoint("10.0.0.1", "n1")])
        api.put_node("n1", taints=[TERMINATION_TAINT])
        async with watching(api.url, maintenance=True, ca_file=tmp_path / "ca.crt", token_file=token) as cluster:
            await until(lambda: bool(cluster.holds()) and api.num_watches == 2)
            assert {seen.authorization for seen in api.requests} == {"Bearer first"}
            token.write_text("second\n")
            api.drop_watches()
            await until(lambda: api.num_watches == 2 and api.requests[-1].authorization == "Bearer second")
            # Renewed by removing and writing: in between the last one goes on.
            token.unlink()
            num_requests = len(api.requests)
            api.drop_watches()
            await until(lambda: api.num_watches == 2 and len(api.requests) >= num_requests + 4)
            assert {seen.authorization for seen in api.requests[num_requests:]} == {"Bearer second"}
            assert addresses(cluster) == {"10.0.0.1:50052"}
    assert not [record for record in caplog.records if "second" in str(record.__dict__)]


async def test_an_authority_that_is_not_known_is_said_with_the_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_tls(tmp_path) as api:
        async with watching(api.url) as cluster:
            await until(lambda: cluster.events["failed"] >= 1)
            assert not cluster.is_up
    (said,) = [record for record in caplog.records if record.message.startswith("cannot watch")]
    assert "kubernetes_ca_file" in str(said.__dict__["fields"])


def test_what_is_wrong_with_the_files_is_said_at_the_start_all_at_once_and_without_what_they_hold(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("s3cret of two words")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "lines").write_text("one\r\nX-Other: two")

    def problems(ca_file: str, token_file: str) -> list[str]:
        settings = RouterSettings(
            discovery="kubernetes",
            kubernetes_service="workers",
            kubernetes_namespace="default",
            kubernetes_api="https://127.0.0.1:6443",
            kubernetes_ca_file=str(tmp_path / ca_file),
            kubernetes_token_file=str(tmp_path / token_file),
        )
        settings.check()
        with pytest.raises(ConfigError) as refused:
            Cluster(settings, changed=lambda: None)
        assert "s3cret" not in str(refused.value)
        return [*refused.value.problems]

    ca, token = problems("missing", "missing")
    assert ca.startswith("kubernetes_ca_file is ")
    assert token.startswith("kubernetes_token_file is ")
    assert ca.endswith("cannot be read: No such file or directory")
    assert token.endswith("cannot be read: No such file or directory")
    for name in ("secret", "binary", "empty", "lines"):
        ca, token = problems(name, name)
        assert "holds no certificate in PEM" in ca
        assert "holds no token" in token


@pytest.mark.parametrize("missing", ["kubernetes", "pod"])
def test_what_is_missing_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    if missing == "kubernetes":
        monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    settings = RouterSettings(discovery="kubernetes", kubernetes_service="workers", kubernetes_namespace="default")
    with pytest.raises(ConfigError, match=r"ostrya\[kubernetes\]" if missing == "kubernetes" else "kubernetes_api"):
        Cluster(settings, changed=lambda: None)


def test_outside_of_a_pod_the_namespace_must_be_given(monkeypatch: pytest.MonkeyPatch, api: KubeApi) -> None:
    monkeypatch.setattr(cluster_module, "NAMESPACE_FILE", cluster_module.NAMESPACE_FILE / "missing")
    settings = RouterSettings(discovery="kubernetes", kubernetes_service="workers", kubernetes_api=api.url)
    with pytest.raises(ConfigError, match="kubernetes_namespace"):
        Cluster(settings, changed=lambda: None)
