"""Every option and variable that a container gets is one that the real command takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ostrya.cli.simulated import STAND_IN
from tests.chart.commands import Command, check_config, command_of, expanded, options
from tests.chart.pods import pods
from tests.chart.render import Render, preset


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$(C)", "$(C)"),
        ("$A ${A} $", "$A ${A} $"),
    ],
)
def test_expands_as_kubernetes_does(text: str, expected: str) -> None:
    assert expanded(text, {"A": "1", "B": "2"}) == expected


def commands(shown: Render, *subcommands: str) -> dict[str, Command]:
    """By pod and container."""
    found = {
        f"{container.name} of {pod}": command_of(shown, pod, container)
        for pod in pods(shown)
        for container in pod.spec.all_containers
    }
    return {name: one for name, one in found.items() if one.args[:1] in [(sub,) for sub in subcommands]}


def test_every_router_and_worker_container_passes_check_config(shown: Render) -> None:
    found = commands(shown, "router", "worker")
    assert len(found) == sum(pod.component in ("router", "worker") for pod in pods(shown))
    refused = {name: said for name, one in found.items() for code, said in [check_config(one)] if code}
    assert refused == {}


def test_every_variable_reference_is_resolved(shown: Render) -> None:
    for name, command in commands(shown, "router", "worker", "fetch").items():
        left = [one for one in (*command.args, *(value for _, value in command.env)) if "$(" in one]
        assert left == [], name


def test_every_init_container_is_a_fetch_that_parses(shown: Render) -> None:
    found = commands(shown, "fetch")
    assert len(found) == sum(len(pod.spec.init_containers) for pod in pods(shown))
    for command in found.values():
        options(command)


def test_what_a_fetch_brings_lies_where_the_main_container_looks(shown: Render) -> None:
    for pod in pods(shown):
        for init in pod.spec.init_containers:
            asked = options(command_of(shown, pod, init))
            target = Path(str(asked["destination"]))
            read = options(command_of(shown, pod, pod.main))
            if asked["phase"] == "fetch_model":
                assert str(target) == read["model"]
                # Routers need no weights; with them they would ask for as much disk and time as a worker.
                assert asked["only"] == ("tokenizer" if pod.component == "router" else None)
            mounts = {mount.mount_path: mount.name for mount in pod.main.volume_mounts}
            written = {mount.mount_path: mount.name for mount in init.volume_mounts if not mount.read_only}
            shared = [path for path in (target, *target.parents) if str(path) in written]
            assert shared, f"{init.name} of {pod} writes to {target}, which is no volume"
            assert mounts.get(str(shared[0])) == written[str(shared[0])]
            if pod.component == "worker":
                reports = str(asked["report_dir"])
                assert reports == read["start_report_dir"]
                assert mounts[reports] == written[reports]


def test_simulated_workers_are_those_of_cpu_and_the_router_serves_their_models_name() -> None:
    shown = preset("ci/simulated-values")
    worker, router = (next(iter(pods(shown, component))) for component in ("worker", "router"))
    assert "ostrya/worker-cpu:" in worker.main.image
    asked = options(command_of(shown, worker, worker.main))
    assert (asked["model"], asked["slice"]) == ("kimi-k3", "tpu7x-16")
    served = options(command_of(shown, router, router.main))
    assert asked["model_name"] == served["model_name"] == "kimi-k3"
    # Both have the tokenizer of the model that is in their image.
    assert served["model"] == STAND_IN


def test_the_compile_cache_of_xla_is_in_the_volume_that_keeps_it(shown: Render) -> None:
    for pod in pods(shown, "worker"):
        command = command_of(shown, pod, pod.main)
        # torch_xla's name for it, which no other backend reads.
        cache = dict(command.env).get("XLA_PERSISTENT_CACHE_PATH")
        assert (cache is not None) is (options(command)["backend"] == "xla"), f"{pod}"
        (mount,) = [one for one in pod.main.volume_mounts if one.name == "compile-cache"]
        assert not mount.read_only
        assert cache is None or Path(mount.mount_path) in Path(cache).parents
        for init in pod.spec.init_containers:
            asked = options(command_of(shown, pod, init))
            if asked["phase"] == "fetch_compile_cache" and cache is not None:
                assert asked["destination"] == Path(cache)


@pytest.mark.parametrize("component", ["router", "worker"])
def test_the_command_line_says_the_same_in_a_process_of_its_own(component: str) -> None:
    shown = preset("defaults")
    (command,) = commands(shown, component).values()
    outer = {name: value for name, value in os.environ.items() if not name.startswith("OSTRYA_")}
    done = subprocess.run(
        [Path(sys.executable).with_name("ostrya"), *command.args, "--check-config"],
        env=outer | dict(command.env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == check_config(command), done.stderr


def test_check_config_finds_a_variable_that_no_option_reads() -> None:
    """The proof above would be empty if it did not."""
    (command,) = commands(preset("defaults"), "router").values()
    wrong = Command(args=command.args, env=(*command.env, ("OSTRYA_MAX_IN_FLIHT", "5")))
    code, said = check_config(wrong)
    assert code != 0
    assert "OSTRYA_MAX_IN_FLIHT" in said
    code, said = check_config(Command(args=(*command.args, "--max-in-fliht=5"), env=command.env))
    assert code != 0
    assert "--max-in-fliht" in said
