"""A real Prometheus (Debian's) on a free port of 127.0.0.1, with the shipped configuration pointed at a test's targets.

Whoever starts one stops it.
"""

import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.redis_server import free_port

OBSERVABILITY = Path(__file__).parents[2] / "deploy" / "observability"
SHIPPED = OBSERVABILITY / "prometheus.yml"
INTERVAL = "1s"

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 15.0


def binary() -> str:
    """The program. Skips the calling test if there is none; fails it instead where OSTRYA_REQUIRE_ALL=1."""
    found = shutil.which("prometheus")
    if found is None:
        skip_or_fail = pytest.fail if os.environ.get("OSTRYA_REQUIRE_ALL") == "1" else pytest.skip
        skip_or_fail("no prometheus on this machine")
    assert found is not None
    return found


def configuration(targets: Mapping[str, str], device_plugins: Sequence[str]) -> str:
    """prometheus.yml with every target replaced, faster, the rules by absolute path. KeyError: a target is new."""
    shipped: dict[str, Any] = yaml.safe_load(SHIPPED.read_text())
    shipped["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
    shipped["rule_files"] = [str(OBSERVABILITY / pattern) for pattern in shipped["rule_files"]]
    for job in shipped["scrape_configs"]:
        for static in job["static_configs"]:
            static["targets"] = [targets[target] for target in static["targets"]]
        if job["job_name"] == "tpu-device-plugin":
            job["static_configs"] = [{"targets": list(device_plugins)}]
    return yaml.safe_dump(shipped)


@dataclass(slots=True)
class RunningPrometheus:
    """One server process; its data lie under the directory that was given."""

    url: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """SIGTERM and wait."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_STOP_TIMEOUT_S)


def start_prometheus(config: str, directory: Path) -> RunningPrometheus:
    """Starts a server and waits until it is ready. AssertionError with its log if it does not get there."""
    program, port = binary(), free_port()
    (directory / "prometheus.yml").write_text(config)
    command = [
        program,
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = directory / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    running = RunningPrometheus(f"http://127.0.0.1:{port}", process)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not _is_ready(running.url):
        if process.poll() is not None or time.monotonic() > deadline:
            running.stop()
            raise AssertionError(f"prometheus is not ready: {log.read_text()[-2000:]}")
        time.sleep(0.1)  # a real process starts; nothing to wait on but its port
    return running


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=1) as answer:
            return int(answer.status) == 200
    except OSError:
        return False
