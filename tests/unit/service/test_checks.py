"""Settings that cannot work are told all at once, without a password."""

import pytest

from ostrya.errors import ConfigError
from ostrya.router.settings import RouterSettings
from ostrya.worker.settings import WorkerSettings


def test_every_problem_of_a_router_is_told_at_once() -> None:
    wrong = RouterSettings(
        redis_url="blah", log_level="loud", max_attempts=0, drain_timeout_s=-1, static_workers=("x",)
    )
    with pytest.raises(ConfigError) as refused:
        wrong.check()
    told = " ".join(refused.value.problems)
    assert len(refused.value.problems) == 5
    assert all(word in told for word in ("redis_url", "loud", "max_attempts", "drain_timeout_s", "host:port"))


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_a_worker_on_every_interface_must_say_where_it_is(host: str) -> None:
    with pytest.raises(ConfigError, match="set advertise_address"):
        WorkerSettings(worker_id="w", host=host).check()
    WorkerSettings(worker_id="w", host=host, advertise_address="10.0.0.1:50052").check()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (RouterSettings(host=""), "host is ''"),
        (RouterSettings(host=" 127.0.0.1"), "host is ' 127.0.0.1'"),
        (RouterSettings(port=99999), "port is 99999"),
        (RouterSettings(port=-1), "port is -1"),
        (RouterSettings(metrics_port=70000), "metrics_port is 70000"),
        (RouterSettings(otlp_endpoint="h:99999"), "otlp_endpoint is 'h:99999'; its port must be 1 to 65535"),
        (RouterSettings(otlp_endpoint="https://h:0"), "otlp_endpoint is 'https://h:0'"),
        (RouterSettings(static_workers=("h:99999",)), "static worker 'h:99999' is not host:port"),
        (RouterSettings(static_workers=("h:0",)), "static worker 'h:0'"),
        (RouterSettings(drain_timeout_s=INF), "drain_timeout_s is inf"),
        (RouterSettings(no_replica_wait_s=INF), "no_replica_wait_s is inf"),
        (
            RouterSettings(discovery="kubernetes", kubernetes_service="w", kubernetes_api="https://h:99999"),
            "kubernetes_api is 'https://h:99999'",
        ),
        (WorkerSettings(worker_id="w", host=""), "host is ''"),
        (WorkerSettings(worker_id="w", port=65536), "port is 65536"),
        (WorkerSettings(worker_id="w", metrics_port=-5), "metrics_port is -5"),
        (WorkerSettings(worker_id="w", drain_timeout_s=NAN), "drain_timeout_s is nan"),
        (WorkerSettings(worker_id="w", advertise_address="foo"), "advertise_address is 'foo'; it must be host:port"),
        (WorkerSettings(worker_id="w", advertise_address="foo:99999"), "advertise_address is 'foo:99999'"),
        (WorkerSettings(worker_id="w", otlp_endpoint="h:99999"), "otlp_endpoint is 'h:99999'"),
    ],
)
def test_addresses_ports_and_times_that_cannot_work_are_told(
    settings: RouterSettings | WorkerSettings, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        settings.check()
    (problem,) = refused.value.problems
    assert problem.startswith(says)


def test_addresses_ports_and_times_that_can_work_are_taken() -> None:
    static = ("worker:50052", "[::1]:65535", "10.0.0.1:1")
    RouterSettings(host="::", port=65535, metrics_port=0, static_workers=static, drain_timeout_s=0).check()
    RouterSettings(otlp_endpoint="http://[::1]:4317").check()
    WorkerSettings(worker_id="w", host="::", port=0, advertise_address="[fd00::1]:50052").check()
    api = "https://kubernetes.default"
    RouterSettings(discovery="kubernetes", kubernetes_service="w", kubernetes_api=api).check()


SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        "",
        SECRET,
        f"{SECRET}:h",
        f"http://:{SECRET}@h/0",
        "redis://",
        "redis:///0",
        "redis://h:port/0",
        "redis://h:99999",
        f"redis://:{SECRET}/x@h",
        f"redis://u:{SECRET}#x@h",
        f"redis://u:1?{SECRET}@h",
        f"redis://u:1/{SECRET}@h",
        f"redis://h/{SECRET}",
        f"redis://h?password={SECRET}",
        f"rediss://h?ssl_ca={SECRET}",
        f"rediss://h?ssl_cert_reqs={SECRET}",
        f"rediss://h?{SECRET}=1",
        f"unix://?db={SECRET}",
        f"unix:///s?password={SECRET}",
        f"redis://[{SECRET}]@h",
        f"redis://:12/{SECRET}@h/0",
        f"redis://u:/{SECRET}@h",
        f"redis://:{SECRET}@h/0?db={SECRET}x",
        f"redis://h?socket_timeout={SECRET}",
        f"rediss://u:12?ssl_ca_certs={SECRET}@h",
        f"unix:///s?db={SECRET}",
    ],
)
def test_a_redis_url_that_cannot_work_is_refused_without_a_part_of_it(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        WorkerSettings(worker_id="w", redis_url=url).check()
    assert "redis_url" in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h:1/0",
        "redis://:word@h:1",
        "redis://us%40er:p%2Fa%3Fs%23s@h:6379/12",
        "redis://[::1]:6379/0",
        "rediss://user:word@h",
        "rediss://h:6380/0?ssl_ca_certs=/etc/ca.crt&ssl_certfile=/c&ssl_keyfile=/k&ssl_check_hostname=true",
        "rediss://h?ssl_cert_reqs=none",
        "unix:///run/redis.sock",
        "unix:///run/redis.sock?db=3",
    ],
)
def test_redis_urls_that_work_are_taken(url: str) -> None:
    WorkerSettings(worker_id="w", redis_url=url).check()
