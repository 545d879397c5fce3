"""`ostrya up --backend roofline`: a model of 2.8 T parameters, whose answers outlive the worker that began them."""

import json
import os
import re
import signal
import urllib.request
from pathlib import Path

from typer.testing import CliRunner

from ostrya.cli.main import app
from ostrya.client import Client, Stream
from tests.fakes.redis_server import free_port
from tests.integration.test_up import END_S, Up, ostrya_up

UP = ("--backend", "roofline", "--model", "kimi-k3", "--slice", "tpu7x-16", "--port")


def pid_of(worker: str, up: Up) -> int:
    """Of the process that was started as this worker."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in up.processes()}
    (found,) = (pid for pid, said in words.items() if worker.encode() in said)
    return found


def asked(client: Client) -> Stream:
    return client.generate("The hop-hornbeam", temperature=1.0, seed=7, max_tokens=60)


def test_a_simulated_stack_goes_on_with_the_same_tokens_when_a_worker_is_killed(tmp_path: Path) -> None:
    with ostrya_up(tmp_path, *UP, str(free_port())) as up:
        up.says("Ctrl-C stops everything.")
        said = up.output()
        assert "simulated: nothing of kimi-k3 is computed" in said
        assert re.search(r"simulated: \d+ prompt tokens .* tok/s", said)
        target = said.partition("ostrya chat --target ")[2].split()[0]
        with Client(target) as client:
            undisturbed = [token for chunk in asked(client) for token in chunk.token_ids]
            stream, tokens = asked(client), list[int]()
            for chunk in stream:
                if not tokens:
                    first = stream.replica
                    os.kill(pid_of(first, up), signal.SIGKILL)
                tokens += chunk.token_ids
            assert len(tokens) == 60
            assert tokens == undisturbed
            assert stream.replica != first
            assert stream.usage is not None
            assert stream.usage.is_simulated
            replicas = {one.worker_id: one for one in client.replicas().replicas}
            assert replicas[stream.replica].simulated
            assert client.explain(stream.decision_id).simulated
        metrics = re.findall(rf"(http://\S+)  {stream.replica}", said)[0]
        with urllib.request.urlopen(metrics, timeout=5) as answer:
            shown = answer.read().decode()
        assert 'ostrya_worker_simulated{model="kimi-k3"} 1.0' in shown
        sums = dict(re.findall(r'step_(\w+)_seconds_total\{(?:bound="memory",)?kind="decode".*\} (\S+)', shown))
        # `ostrya capacity` says of one request: 1.17 ms at least, 20.3 ms expected. A busy machine takes longer.
        share = float(sums["limit"]) / float(sums["taken"])
        assert 0.01 < share < 0.06
        bench = ["bench", "--target", target, "--requests", "4", "--max-tokens", "3", "--json"]
        assert "all answers are of backend roofline" in json.loads(CliRunner().invoke(app, bench).stdout)["simulated"]
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(END_S) == 0
        assert up.everything_ends()
