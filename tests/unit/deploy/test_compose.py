"""compose.yaml is a valid Compose file, its services are locked down, and what it starts accepts its options."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import msgspec
import pytest
import redis
import yaml
from compose_spec import PyCompose
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from tests.fakes.redis_server import binary, free_port, require
from tests.fakes.waiting import until
from tests.unit.deploy.images import IMAGES, ROOT, VERSION

FILE = ROOT / "deploy" / "compose.yaml"
TREE = yaml.safe_load(FILE.read_text())


class Build(msgspec.Struct):
    context: str
    dockerfile: str
    args: list[str]


class Healthcheck(msgspec.Struct):
    test: list[str]


class Service(msgspec.Struct):
    """What these tests look at; PyCompose looks at all of it."""

    image: str
    user: str
    read_only: bool
    cap_drop: list[str]
    security_opt: list[str]
    networks: list[str]
    healthcheck: Healthcheck
    command: list[str] = []
    ports: list[str] = []
    volumes: list[str] = []
    tmpfs: list[str] = []
    pull_policy: str = ""
    build: Build | None = None
    depends_on: dict[str, dict[str, str]] = {}


class Network(msgspec.Struct):
    internal: bool = False


class Compose(msgspec.Struct):
    services: dict[str, Service]
    networks: dict[str, Network]
    volumes: dict[str, dict[str, str]]


class Target(msgspec.Struct):
    targets: list[str]
    labels: dict[str, str] = {}


class Scrape(msgspec.Struct):
    job_name: str
    static_configs: list[Target]


class Prometheus(msgspec.Struct):
    scrape_configs: list[Scrape]
    rule_files: list[str] = []


COMPOSE = msgspec.convert(TREE, Compose)
SERVICES = COMPOSE.services
OURS = {name: one for name, one in SERVICES.items() if one.image.startswith("ostrya/")}
BUILT = {name: one for name, one in SERVICES.items() if one.build is not None}
EVERY = pytest.mark.parametrize("name", sorted(SERVICES))


def prometheus() -> Prometheus:
    return msgspec.convert(yaml.safe_load((ROOT / "deploy/observability/prometheus.yml").read_text()), Prometheus)


def option(service: Service, name: str) -> str:
    (found,) = [one.removeprefix(f"{name}=") for one in service.command if one.startswith(f"{name}=")]
    return found


def test_it_keeps_the_compose_specification() -> None:
    # Merge keys are YAML's, resolved before Compose's own rules apply.
    PyCompose.from_yaml(yaml.safe_dump(TREE)).validate()


def test_it_has_redis_a_router_two_workers_prometheus_and_grafana() -> None:
    assert sorted(SERVICES) == ["grafana", "prometheus", "redis", "router", "worker-0", "worker-1"]


@EVERY
def test_a_service_has_no_rights_it_does_not_need(name: str) -> None:
    service = SERVICES[name]
    assert service.read_only
    assert service.cap_drop == ["ALL"]
    assert service.security_opt == ["no-new-privileges:true"]
    assert re.fullmatch(r"[1-9]\d*:\d+", service.user), "not root, by number"
    assert service.healthcheck.test


@EVERY
def test_an_image_is_of_an_exact_version(name: str) -> None:
    assert re.search(r":v?\d+\.\d+\.\d+(-alpine)?$", SERVICES[name].image)


@EVERY
def test_ports_are_open_to_this_machine_only(name: str) -> None:
    service = SERVICES[name]
    assert all(port.startswith("127.0.0.1:") for port in service.ports)
    assert service.ports == [] or any(not COMPOSE.networks[one].internal for one in service.networks)


def test_redis_and_workers_are_behind_a_network_without_a_way_out() -> None:
    for name in ("redis", "worker-0", "worker-1"):
        assert SERVICES[name].ports == []
        assert [COMPOSE.networks[one].internal for one in SERVICES[name].networks] == [True]


@EVERY
def test_what_it_mounts_exists_and_is_read_only(name: str) -> None:
    for volume in SERVICES[name].volumes:
        source, _, mode = volume.split(":")[0], volume.split(":")[1], volume.split(":")[2:]
        if source.startswith("."):
            assert (FILE.parent / source).exists(), source
            assert mode == ["ro"]
        else:
            assert source in COMPOSE.volumes


@EVERY
def test_who_waits_for_a_service_waits_for_one_that_is_there(name: str) -> None:
    assert set(SERVICES[name].depends_on) <= set(SERVICES)
    assert all(one["condition"] == "service_healthy" for one in SERVICES[name].depends_on.values())


def test_each_of_our_images_is_built_once_and_pulled_by_nobody() -> None:
    assert sorted(one.image for one in BUILT.values()) == sorted({one.image for one in OURS.values()})
    assert {name for name, one in OURS.items() if one.pull_policy == "never"} == set(OURS) - set(BUILT)


@pytest.mark.parametrize("name", sorted(BUILT))
def test_our_images_are_built_from_our_dockerfiles(name: str) -> None:
    build = BUILT[name].build
    assert build is not None
    assert (FILE.parent / build.context).resolve() == ROOT
    image = build.dockerfile.removeprefix("deploy/docker/").removesuffix(".Dockerfile")
    labels = IMAGES[image].final.pairs("LABEL")
    assert BUILT[name].image == f"{labels['org.opencontainers.image.title']}:{VERSION}"
    assert BUILT[name].user == IMAGES[image].final.last("USER").text
    declared = {one.text for one in IMAGES[image].stages[0].all("ARG")}
    assert set(build.args) <= declared


@pytest.mark.parametrize("name", sorted(OURS))
def test_our_services_accept_their_options(name: str) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OSTRYA_")}
    command = [sys.executable, "-m", "ostrya.cli.main", *OURS[name].command, "--check-config"]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_workers_are_reached_by_their_own_names() -> None:
    for name in ("worker-0", "worker-1"):
        service = SERVICES[name]
        assert option(service, "--worker-id") == name
        assert option(service, "--advertise-address") == f"{name}:{option(service, '--port')}"
        assert option(service, "--redis-url") == option(SERVICES["router"], "--redis-url") == "redis://redis:6379/0"


def test_prometheus_scrapes_every_service_of_ours_under_its_own_name() -> None:
    found = {
        target: (scrape.job_name, one.labels.get("pool"), one.labels.get("replica"))
        for scrape in prometheus().scrape_configs
        for one in scrape.static_configs
        for target in one.targets
        if target.split(":")[0] in OURS
    }
    assert found == {
        f"{name}:{option(one, '--metrics-port')}": (f"ostrya-{one.command[0]}", "default", name)
        for name, one in OURS.items()
    }


def test_every_target_and_rule_file_of_prometheus_is_there() -> None:
    hosts = {t.split(":")[0] for s in prometheus().scrape_configs for one in s.static_configs for t in one.targets}
    assert hosts <= {*SERVICES, "localhost", "127.0.0.1"}
    mounts = {one.split(":")[1]: FILE.parent / one.split(":")[0] for one in SERVICES["prometheus"].volumes}
    for pattern in prometheus().rule_files:
        # Relative to the configuration, which lies in /etc/prometheus.
        folder, _, names = f"/etc/prometheus/{pattern}".rpartition("/")
        assert list(mounts[folder].glob(names)), pattern


def test_grafana_looks_for_dashboards_where_they_are_mounted() -> None:
    provisioning = ROOT / "deploy/observability/grafana/provisioning"
    text = "".join(path.read_text() for path in sorted(provisioning.rglob("*.y*ml")))
    assert "url: http://prometheus:9090" in text
    mounted = {one.split(":")[1] for one in SERVICES["grafana"].volumes}
    (folder,) = re.findall(r"path: (\S+)", text)
    assert folder in mounted


def test_valkey_takes_its_options_and_writes_where_it_may(tmp_path: Path) -> None:
    require("valkey")
    program = binary("valkey")
    assert program is not None
    name, *options = SERVICES["redis"].command
    assert name == "valkey-server"
    port = free_port()
    folder = SERVICES["redis"].tmpfs[0]
    assert options.count(folder) == 1, "its directory is the one that is writable"
    here = [str(tmp_path) if one == folder else one for one in options]
    server = subprocess.Popen([program, *here, "--port", str(port), "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port) as client:
            asyncio.run(until(lambda: answers(client)))
            said = client.config_get("dir", "save", "appendonly", "maxmemory", "maxmemory-policy")
    finally:
        server.terminate()
        server.wait(10)
    assert said == {
        "dir": str(tmp_path),
        "save": "",
        "appendonly": "no",
        "maxmemory": str(256 * 1024 * 1024),
        "maxmemory-policy": "volatile-lru",
    }


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@pytest.fixture
def health() -> Iterator[tuple[HealthServicer, str]]:
    servicer = HealthServicer()
    threads = ThreadPoolExecutor(max_workers=2)
    server = grpc.server(threads)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, str(port)
    server.stop(None).wait()
    threads.shutdown()


@pytest.mark.parametrize("name", sorted(OURS))
def test_the_health_check_of_our_services_tells_serving_from_the_rest(
    name: str, health: tuple[HealthServicer, str]
) -> None:
    servicer, port = health
    kind, python, *arguments, asked = OURS[name].healthcheck.test
    assert (kind, python, asked) == ("CMD", "python", option(OURS[name], "--port"))

    def exit_code(port: str) -> int:
        done = subprocess.run([sys.executable, *arguments, port], capture_output=True, check=False)
        return done.returncode

    states = health_pb2.HealthCheckResponse
    servicer.set("", states.SERVING)
    assert exit_code(port) == 0
    servicer.set("", states.NOT_SERVING)
    assert exit_code(port) == 1
    assert exit_code("1") == 1
