"""A port from end to end: what is dialed, what a Service offers, what a container declares, where its process listens.

What `ostrya` assumes is asked of `ostrya` itself: its client's default target, and the port name that routers look for
in EndpointSlices.
"""

import inspect
import re

import pytest

from ostrya.cli.report import DEFAULT_TARGET
from ostrya.router.endpoints import merge
from tests.chart.commands import command_of, options
from tests.chart.objects import ServicePort
from tests.chart.pods import Pod, pods
from tests.chart.render import NAMESPACE, Render, chart, overrides, preset, value_files
from tests.chart.test_redis import redis_url
from tests.chart.test_references import services

# No option of ours: the rendered command of Valkey says it, which test_redis.py runs.
REDIS_PORT = 6379


def listens(shown: Render, pod: Pod, name: str) -> int:
    """Where the process of this pod listens for what its container calls `name`."""
    if pod.component == "redis":
        script = " ".join(pod.main.command)
        assert f"--port {REDIS_PORT}" in script
        return REDIS_PORT
    asked = options(command_of(shown, pod, pod.main))
    port = asked[{"grpc": "port", "health": "port", "metrics": "metrics_port", "slice": "slice_port"}[name]]
    assert isinstance(port, int)
    return port


def offered(shown: Render, host: str) -> dict[str, ServicePort]:
    """Ports by name of the Service of this DNS name, in the namespace or with it."""
    name, _, rest = host.partition(".")
    assert rest in ("", NAMESPACE), host
    (found,) = [
        {port.name: port for port in spec.ports} for service, spec, _ in services(shown) if service.name == name
    ]
    return found


def test_a_service_a_container_and_its_process_agree_on_every_port(shown: Render) -> None:
    for service, spec, selected in services(shown):
        assert spec.ports
        for port in spec.ports:
            target = port.port if port.target_port is None else port.target_port
            for pod in selected:
                declared = pod.port(target)
                assert declared == listens(shown, pod, port.name), f"{service} {port.name} of {pod}"
                # Headless Services change no port, so a dialed one is the process's; the others keep to that.
                assert port.port == declared, f"{service} offers {port.port} for {declared} of {pod}"
    for pod in pods(shown):
        for one in (one for container in pod.spec.containers for one in container.ports):
            assert one.container_port == listens(shown, pod, one.name), f"{one.name} of {pod}"


def test_routers_and_workers_dial_the_port_that_redis_offers(shown: Render) -> None:
    if not pods(shown, "redis"):
        return
    for pod in (*pods(shown, "router"), *pods(shown, "worker")):
        host, _, port = redis_url(shown, pod).rpartition("@")[2].partition("/")[0].partition(":")
        assert int(port) == offered(shown, host)["redis"].port


def test_workers_advertise_where_they_listen_and_routers_find_it_by_name(shown: Render) -> None:
    looked_for = inspect.signature(merge).parameters["port_name"].default
    for pod in pods(shown, "worker"):
        if pod.leads:
            address = str(options(command_of(shown, pod, pod.main))["advertise_address"])
            assert int(address.rpartition(":")[2]) == listens(shown, pod, "grpc")
    for router in pods(shown, "router"):
        assert offered(shown, f"{router.owner.name.removesuffix('-router')}-workers").keys() == {looked_for}


@pytest.mark.parametrize("name", list(value_files()))
def test_the_notes_dial_what_is_offered(name: str) -> None:
    shown = preset(name)
    notes = chart().render(overrides(name), name=shown.release, namespace=NAMESPACE)["ostrya/templates/NOTES.txt"]
    forwards = re.findall(r"port-forward service/(\S+) (\d+):(\d+)", notes)
    routers = pods(shown, "router")
    assert len(forwards) == len(routers)
    for service, local, remote in forwards:
        assert int(remote) == offered(shown, service)["grpc"].port
        assert f"--target 127.0.0.1:{local} " in notes
    dialed = re.findall(rf"\b([a-z][-a-z0-9]*(?:\.{NAMESPACE})?):(\d+)", notes)
    assert len(dialed) >= len(routers)
    for host, port in dialed:
        assert int(port) == offered(shown, host)["grpc"].port, f"{host}:{port}"
    # `ostrya generate` in a router's container, without a target.
    for router in routers:
        assert f"127.0.0.1:{listens(shown, router, 'grpc')}" == DEFAULT_TARGET
