"""A real Prometheus on a free port of 127.0.0.1 that scrapes every second what it is told to."""

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from tests.fakes.redis_server import free_port

_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Scraped:
    """One target with its labels."""

    job: str
    address: str
    labels: Mapping[str, str]


def require() -> str:
    """The program; without it the calling test is skipped, or fails where OSTRYA_REQUIRE_ALL=1."""
    program = shutil.which("prometheus")
    if program is None:
        skip_or_fail = pytest.fail if os.environ.get("OSTRYA_REQUIRE_ALL") == "1" else pytest.skip
        skip_or_fail("no prometheus on this machine")
    assert program is not None
    return program


@contextmanager
def prometheus(directory: Path, *targets: Scraped, rule_files: tuple[Path, ...] = ()) -> Iterator[str]:
    """Its URL, once it is ready; with targets, once it has scraped each, up or down."""
    configuration = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rule_files],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [
                    {"targets": [one.address], "labels": dict(one.labels)} for one in targets if one.job == job
                ],
            }
            for job in sorted({one.job for one in targets})
        ],
    }
    program, url = require(), f"http://127.0.0.1:{free_port()}"
    # YAML takes JSON.
    (directory / "prometheus.yml").write_text(json.dumps(configuration))
    options = ("--config.file", str(directory / "prometheus.yml"), "--storage.tsdb.path", str(directory / "tsdb"))
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *options, f"--web.listen-address={url.removeprefix('http://')}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while _num_scraped(url) < len(targets):
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError((directory / "prometheus.log").read_text()[-2000:])
            time.sleep(0.1)  # another process starts
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _num_scraped(url: str) -> int:
    """-1 until it answers and has read its rules."""
    try:
        with (
            urllib.request.urlopen(f"{url}/-/ready", timeout=1),
            urllib.request.urlopen(f"{url}/api/v1/query?query=up", timeout=1) as answer,
        ):
            body = cast("dict[str, dict[str, list[object]]]", json.loads(answer.read()))
    except (OSError, urllib.error.URLError):
        return -1
    return len(body["data"]["result"])
