"""Both metrics endpoints pass promtool's lint, and say nothing about prompts."""

import os
import shutil
import subprocess
import urllib.request

import pytest

from ostrya.client import Client
from tests.integration.stack import RunningStack

SECRET = "xylophonequartz"


@pytest.mark.parametrize("process", ["router", "worker-0"])
def test_promtool_finds_nothing_to_complain_about(stack: RunningStack, process: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        skip_or_fail = pytest.fail if os.environ.get("OSTRYA_REQUIRE_ALL") == "1" else pytest.skip
        skip_or_fail("no promtool on this machine")
    assert promtool is not None
    with Client(stack.target) as client:
        client.generate(text="Hello", max_tokens=2).read()
    with urllib.request.urlopen(stack.metrics_urls[process], timeout=5) as answer:
        exposition = answer.read()
    checked = subprocess.run([promtool, "check", "metrics"], input=exposition, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_no_prompt_text_or_token_id_reaches_logs_or_metrics(stack: RunningStack) -> None:
    with Client(stack.target) as client:
        ids = client.tokenize(text=SECRET)
        client.generate(text=f"{SECRET} {SECRET}", max_tokens=4, request_id="watched").read()
    for process, url in stack.metrics_urls.items():
        with urllib.request.urlopen(url, timeout=5) as answer:
            seen = answer.read().decode() + (stack.logs / f"{process}.log").read_text()
        assert SECRET not in seen
        assert str(ids) not in seen
        assert str(ids)[1:-1] not in seen
