"""Which host of a slice a worker is, from its settings and from each environment it may meet."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from ostrya.engine.config import EngineConfig
from ostrya.engine.world import ONE_HOST, Slice, World, ranks_per_host
from ostrya.errors import ConfigError
from ostrya.worker.role import role
from ostrya.worker.settings import WorkerSettings

SETTINGS = WorkerSettings(worker_id="w")
LWS = {
    "LWS_LEADER_ADDRESS": "chat-slices-0.chat-slices.ostrya",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "2",
}
TPU = {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "t-0.s,t-1.s,t-2.s,t-3.s"}
LWS_NAMES = ("chat-slices-0", "chat-slices-0-1", "chat-slices-0-2", "chat-slices-0-3")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ONE_HOST),
        ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, ONE_HOST),
        (LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}, ONE_HOST),
        (LWS, Slice(host=2, num_hosts=4, leader=LWS["LWS_LEADER_ADDRESS"], names=LWS_NAMES)),
        (LWS | {"LWS_LEADER_ADDRESS": "10.4.1.9"}, Slice(host=2, num_hosts=4, leader="10.4.1.9")),
        (TPU, Slice(host=2, num_hosts=4, leader="t-0.s", names=("t-0.s", "t-1.s", "t-2.s", "t-3.s"))),
        (LWS | TPU, Slice(host=2, num_hosts=4, leader=LWS["LWS_LEADER_ADDRESS"], names=LWS_NAMES)),
    ],
)
def test_the_environment_says_which_host_this_is(environment: dict[str, str], expected: Slice) -> None:
    found = role(SETTINGS, environment)
    assert (found.host, found.num_hosts, found.leader, found.names) == (
        expected.host,
        expected.num_hosts,
        expected.leader,
        expected.names,
    )
    assert found.port == (SETTINGS.slice_port if expected.num_hosts > 1 else 0)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": ""},
            "LWS_GROUP_SIZE is set but not LWS_LEADER_ADDRESS and LWS_WORKER_INDEX; set all of them or none",
        ),
        ({"TPU_WORKER_ID": "1"}, "TPU_WORKER_ID is set but not TPU_WORKER_HOSTNAMES; set all of them or none"),
        (LWS | {"LWS_WORKER_INDEX": "4"}, "LWS_WORKER_INDEX is '4'; it must be a number, 0 to 3"),
        (LWS | {"LWS_GROUP_SIZE": "four"}, "LWS_GROUP_SIZE is 'four'; it must be a number, at least 1"),
        (TPU | {"TPU_WORKER_ID": "-1"}, "TPU_WORKER_ID is '-1'; it must be a number, 0 to 3"),
        (
            TPU | {"TPU_WORKER_HOSTNAMES": "a,,b"},
            "TPU_WORKER_HOSTNAMES is 'a,,b'; it must be names with commas between",
        ),
        (
            LWS | TPU | {"TPU_WORKER_ID": "1"},
            "LWS_WORKER_INDEX and LWS_GROUP_SIZE say host 2 of 4, TPU_WORKER_ID and TPU_WORKER_HOSTNAMES host 1 of 4",
        ),
    ],
)
def test_an_environment_that_says_half_or_two_things_is_refused_with_its_variables(
    environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        role(SETTINGS, environment)
    assert words in str(caught.value)
    assert len(caught.value.problems) == 1
    alone = dataclasses.replace(SETTINGS, hosts=1)
    assert role(alone, environment) == ONE_HOST, "settings win"


def test_settings_say_it_all_or_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("beech\n")
    given = dataclasses.replace(
        SETTINGS,
        hosts=2,
        host_index=1,
        leader_address="10.0.0.1",
        slice_port=7,
        slice_secret_file=str(tmp_path / "secret"),
    )
    given.check()
    assert role(given, LWS) == Slice(host=1, num_hosts=2, leader="10.0.0.1", port=7, secret="beech")
    with pytest.raises(ConfigError, match="slice_secret_file /nowhere cannot be read"):
        role(dataclasses.replace(given, slice_secret_file="/nowhere"), {})
    for changes, words in (
        ({"hosts": None}, "host_index is set but not hosts"),
        ({"hosts": 0}, "hosts is 0; it must be at least 1"),
        ({"host_index": None}, "hosts is 2; it needs host_index and leader_address too"),
        ({"leader_address": ""}, "hosts is 2; it needs host_index and leader_address too"),
        ({"host_index": 2}, "host_index is 2; it must be 0 to 1"),
        ({"slice_port": 0}, "slice_port is 0; with several hosts it must be 1 to 65534"),
        ({"join_timeout_s": -1.0}, "join_timeout_s"),
    ):
        with pytest.raises(ConfigError) as caught:
            dataclasses.replace(given, **changes).check()
        assert words in str(caught.value)


def test_ranks_lie_one_after_another_over_equal_hosts() -> None:
    config = EngineConfig(
        model_path="/", model_name="m", tokenizer_fingerprint="", backend="torchtpu", tensor_parallel=8
    )
    assert ranks_per_host(config, 2) == 4
    assert [World(rank=rank, size=8, num_hosts=2).local_rank for rank in range(8)] == [0, 1, 2, 3] * 2
    with pytest.raises(ConfigError, match="tensor_parallel is 8; it must be a multiple of the number of hosts, 3"):
        ranks_per_host(config, 3)


@pytest.mark.parametrize("backend", ["xla", "roofline"])
def test_a_backend_of_one_host_is_refused_on_several(backend: str) -> None:
    fields = {"model_path": "/", "model_name": "m", "tokenizer_fingerprint": "", "backend": backend}
    config = msgspec.convert(fields, EngineConfig)
    assert ranks_per_host(config, 1) == 1
    with pytest.raises(
        ConfigError, match=f"hosts are 4; backend {backend} runs on one: take one host, or backend torchtpu"
    ):
        ranks_per_host(config, 4)
