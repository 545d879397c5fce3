"""The fake API server, held against the official client: what it lists, streams and refuses is what a real one does."""

from collections.abc import Generator, Iterator
from typing import Any

import pytest
import urllib3
from kubernetes import client, watch

from tests.fakes.kube_api import NODES, KubeApi, endpoint
from tests.fakes.waiting import until


@pytest.fixture
def api() -> Iterator[KubeApi]:
    with KubeApi() as server:
        yield server


@pytest.fixture
def official(api: KubeApi) -> Iterator[client.ApiClient]:
    """The official client's configured core."""
    configuration = client.Configuration()
    configuration.host = api.url
    configuration.retries = False
    made = client.ApiClient(configuration)
    yield made
    made.rest_client.pool_manager.clear()


@pytest.fixture
def slices(official: client.ApiClient) -> client.DiscoveryV1Api:
    return client.DiscoveryV1Api(official)


def events(official: client.ApiClient, slices: client.DiscoveryV1Api, **options: object) -> Generator[dict[str, Any]]:
    source = watch.Watch()
    source._api_client = official
    yield from source.stream(slices.list_namespaced_endpoint_slice, "default", **options)


def test_a_list_has_the_selected_objects_and_a_version(api: KubeApi, slices: client.DiscoveryV1Api) -> None:
    api.put_slice("b", [endpoint("10.0.0.2", ready=False)])
    api.put_slice("a", [endpoint("10.0.0.1", "n1", ready=True, serving=True, terminating=False)], port=7000)
    api.put_slice("other", [], service="other")
    api.put_slice("elsewhere", [], namespace="elsewhere")
    found = slices.list_namespaced_endpoint_slice("default", label_selector="kubernetes.io/service-name=workers")
    assert [one.metadata.name for one in found.items] == ["a", "b"]
    first = found.items[0].endpoints[0]
    assert (first.addresses, first.node_name, first.conditions.ready) == (["10.0.0.1"], "n1", True)
    assert [(port.name, port.port) for port in found.items[0].ports] == [("metrics", 9401), ("grpc", 7000)]
    assert found.items[1].endpoints[0].conditions.serving is None
    assert int(found.metadata.resource_version) >= int(found.items[0].metadata.resource_version)


def test_nodes_are_listed_with_labels_and_taints(api: KubeApi, official: client.ApiClient) -> None:
    api.put_node("n1", labels={"a": "b"}, taints=["gone"])
    (node,) = client.CoreV1Api(official).list_node().items
    assert (node.metadata.labels, node.spec.taints[0].key) == ({"a": "b"}, "gone")


def test_a_watch_sees_what_happened_after_the_version_it_starts_from(
    api: KubeApi, official: client.ApiClient, slices: client.DiscoveryV1Api
) -> None:
    api.put_slice("old", [])
    version = slices.list_namespaced_endpoint_slice("default").metadata.resource_version
    api.put_slice("a", [endpoint()])
    seen = events(official, slices, resource_version=version, allow_watch_bookmarks=True, timeout_seconds=5)
    assert [(event["type"], event["object"].metadata.name) for event in [next(seen)]] == [("ADDED", "a")]
    api.put_slice("a", [endpoint(ready=False)])
    changed = next(seen)
    assert (changed["type"], changed["object"].endpoints[0].conditions.ready) == ("MODIFIED", False)
    api.bookmark()
    assert next(seen)["type"] == "BOOKMARK"
    api.delete_slice("a")
    gone = next(seen)
    assert (gone["type"], gone["object"].metadata.name) == ("DELETED", "a")
    assert int(gone["object"].metadata.resource_version) > int(changed["object"].metadata.resource_version)
    seen.close()


def test_a_watch_without_a_version_begins_with_what_is_there(
    api: KubeApi, official: client.ApiClient, slices: client.DiscoveryV1Api
) -> None:
    api.put_slice("a", [])
    seen = events(official, slices, timeout_seconds=5)
    assert next(seen)["type"] == "ADDED"
    seen.close()


def test_an_object_that_leaves_the_selection_is_deleted_for_that_watch(
    api: KubeApi, official: client.ApiClient, slices: client.DiscoveryV1Api
) -> None:
    api.put_slice("a", [])
    seen = events(official, slices, label_selector="kubernetes.io/service-name=workers", timeout_seconds=5)
    assert next(seen)["type"] == "ADDED"
    api.put_slice("a", [], service="other")
    assert next(seen)["type"] == "DELETED"
    seen.close()


async def test_a_watch_ends_cleanly_at_its_timeout(
    api: KubeApi, official: client.ApiClient, slices: client.DiscoveryV1Api
) -> None:
    api.put_slice("a", [])
    assert [event["type"] for event in events(official, slices, timeout_seconds=1)] == ["ADDED"]
    await until(lambda: api.num_watches == 0)  # the client may read the end first


def test_a_version_that_is_forgotten_is_410_before_and_during_a_watch(
    api: KubeApi, official: client.ApiClient, slices: client.DiscoveryV1Api
) -> None:
    api.put_slice("a", [])
    version = slices.list_namespaced_endpoint_slice("default").metadata.resource_version
    running = events(official, slices, timeout_seconds=5)
    next(running)
    api.expire()
    with pytest.raises(client.ApiException) as during:
        next(running)
    assert during.value.status == 410
    with pytest.raises(client.ApiException) as before:
        list(events(official, slices, resource_version=version, timeout_seconds=1))
    assert before.value.status == 410
    fresh = slices.list_namespaced_endpoint_slice("default").metadata.resource_version
    assert list(events(official, slices, resource_version=fresh, timeout_seconds=1)) == []


@pytest.mark.parametrize("truncated", [False, True])
def test_a_dropped_watch_breaks_in_the_middle(
    api: KubeApi, official: client.ApiClient, slices: client.DiscoveryV1Api, truncated: bool
) -> None:
    api.put_slice("a", [])
    seen = events(official, slices, timeout_seconds=5)
    next(seen)
    api.drop_watches(truncated=truncated)
    with pytest.raises(urllib3.exceptions.ProtocolError):
        next(seen)


def test_a_silent_watch_is_noticed_by_the_clients_own_timeout_only(
    api: KubeApi, official: client.ApiClient, slices: client.DiscoveryV1Api
) -> None:
    api.put_slice("a", [])
    seen = events(official, slices, timeout_seconds=1, _request_timeout=(1.0, 1.5))
    next(seen)
    api.go_silent()
    api.delete_slice("a")
    with pytest.raises(urllib3.exceptions.ReadTimeoutError):
        next(seen)


def test_a_swallowed_change_shows_in_lists_alone(
    api: KubeApi, official: client.ApiClient, slices: client.DiscoveryV1Api
) -> None:
    api.put_slice("a", [])
    seen = events(official, slices, timeout_seconds=1)
    next(seen)
    api.swallow_next()
    api.delete_slice("a")
    assert list(seen) == []
    assert slices.list_namespaced_endpoint_slice("default").items == []


@pytest.mark.parametrize("status", [401, 403, 500])
def test_refusals_are_told_as_the_client_expects(
    api: KubeApi, official: client.ApiClient, slices: client.DiscoveryV1Api, status: int
) -> None:
    api.refuse("list", status)
    with pytest.raises(client.ApiException) as refused:
        slices.list_namespaced_endpoint_slice("default")
    assert refused.value.status == status
    api.accept()
    api.refuse("watch", status)
    slices.list_namespaced_endpoint_slice("default")
    with pytest.raises(client.ApiException) as refused:
        list(events(official, slices, timeout_seconds=1))
    assert refused.value.status == status


def test_one_collection_can_be_refused_alone(
    api: KubeApi, official: client.ApiClient, slices: client.DiscoveryV1Api
) -> None:
    api.refuse("list", 403, path=NODES)
    assert slices.list_namespaced_endpoint_slice("default").items == []
    with pytest.raises(client.ApiException) as refused:
        client.CoreV1Api(official).list_node()
    assert refused.value.status == 403
    api.accept()
    assert client.CoreV1Api(official).list_node().items == []


def test_a_stopped_server_is_gone_and_comes_back_on_its_port_with_its_objects(
    api: KubeApi, slices: client.DiscoveryV1Api
) -> None:
    api.put_slice("a", [])
    api.stop()
    with pytest.raises(urllib3.exceptions.HTTPError):
        slices.list_namespaced_endpoint_slice("default")
    api.start()
    assert len(slices.list_namespaced_endpoint_slice("default").items) == 1
