"""The real stack, watched by a real Prometheus: Redis, a router in mode kubernetes, two workers with the real model.

What is not real: the Kubernetes API (tests/fakes/kube_api.py) and the TPU device plugin (tpu_device_plugin.prom). The
load is `ostrya bench`, together with what else happens to a pool: requests that must wait, and clients that go away.
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from deploy.observability.viewer import Prometheus
from ostrya.client import Client
from tests.fakes.kube_api import KubeApi, endpoint
from tests.integration.stack import RunningStack, start_stack
from tests.ops.prometheus_server import RunningPrometheus, configuration, start_prometheus

DEVICE_PLUGIN = Path(__file__).parent / "tpu_device_plugin.prom"
ROUTER_TARGET, WORKER_TARGETS = "router:9401", ("worker-0:9401", "worker-1:9401")
SCRAPED_S = 20.0
"""Within which every target has been scraped and every rule evaluated, on a busy machine too."""


@dataclass(slots=True)
class Observed:
    """Everything that runs, since when, and whom to ask."""

    stack: RunningStack
    api: KubeApi
    server: RunningPrometheus
    since: float

    @property
    def prometheus(self) -> Prometheus:
        return Prometheus(self.server.url)

    def bench(self, *, requests: int, concurrency: int = 6, max_tokens: int = 24) -> "subprocess.Popen[bytes]":
        """`ostrya bench` in the background, once its requests have arrived; it ends by itself."""
        size = ("--requests", requests, "--concurrency", concurrency, "--max-tokens", max_tokens)
        prompts = ("--prefix-groups", 3, "--prefix-tokens", 128, "--suffix-tokens", 32, "--duration-s", 300)
        command = [sys.executable, "-m", "ostrya.cli.main", "bench", "--target", self.stack.target, "--json"]
        command += [str(word) for word in (*size, *prompts)]
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 60
        while not self.stack.total("router", "ostrya_router_requests_in_flight"):
            assert started.poll() is None, started.communicate()[0]
            assert time.monotonic() < deadline, "the load test does not begin"
            time.sleep(0.1)
        return started

    def go_away(self) -> None:
        """A client that leaves after its first token."""
        with (
            Client(self.stack.target) as client,
            client.generate("The sea is", max_tokens=400, ignore_eos=True) as stream,
        ):
            next(iter(stream))

    def keep_waiting(self, hold_s: float = 2.0) -> None:
        """For a moment no replica takes new work, so what comes waits in the router; AssertionError if nothing did."""
        with Client(self.stack.target) as client:
            for worker in self.stack.workers:
                client.cordon(worker)
            asking = threading.Thread(target=lambda: client.generate("Rain", max_tokens=4).read())
            asking.start()
            deadline = time.monotonic() + hold_s
            waited = False
            while time.monotonic() < deadline:
                waited = waited or self.stack.total("router", "ostrya_router_queue_depth") > 0
                time.sleep(0.1)
            for worker in self.stack.workers:
                client.uncordon(worker)
            asking.join(60)
            assert waited, "no request waited while every replica was cordoned"

    def wait_scraped(self) -> None:
        """Returns when every target answers and all that has happened until now is stored and evaluated."""
        deadline, begin = time.monotonic() + SCRAPED_S, time.time()
        while True:
            up = {
                (one.metric["job"], one.metric.get("replica", "")): one.samples[0]
                for one in self.prometheus.series("up")
            }
            answered = [value for _, value in up.values()]
            evaluated = self.prometheus.series("timestamp(ostrya:workers_ready:max)")
            is_fresh = evaluated and evaluated[0].samples[0][1] > begin + 2
            if len(up) == 4 and all(answered) and is_fresh:
                return
            assert time.monotonic() < deadline, f"targets: {up}; newest rule: {evaluated}"
            time.sleep(0.2)


def finish(load: "subprocess.Popen[bytes]") -> None:
    """Waits for a `bench` to end; AssertionError with its output unless all is well."""
    output, _ = load.communicate(timeout=300)
    assert load.returncode == 0, output


@contextmanager
def observed() -> Iterator[Observed]:
    """Started, routable, scraped; ended on every way out."""
    with ExitStack() as ending:
        directory = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="ostrya-prometheus-")))
        api = ending.enter_context(KubeApi())
        stack = start_stack(worker_options=("--num-pages", "1024"))
        ending.callback(stack.close)
        _discover_through(api, stack)
        plugin = ending.enter_context(_device_plugin())
        addresses = {
            name: url.removeprefix("http://").removesuffix("/metrics") for name, url in stack.metrics_urls.items()
        }
        targets = {ROUTER_TARGET: addresses["router"]}
        targets |= dict(zip(WORKER_TARGETS, (addresses[name] for name in stack.workers), strict=True))
        server = start_prometheus(configuration(targets, [plugin]), directory)
        ending.callback(server.stop)
        running = Observed(stack=stack, api=api, server=server, since=time.time())
        running.wait_scraped()
        yield running


def _discover_through(api: KubeApi, stack: RunningStack) -> None:
    """Gives each worker an EndpointSlice, and starts the router again so that it watches them."""
    for name in stack.workers:
        port = stack.commands[name][stack.commands[name].index("--port") + 1]
        api.put_slice(name, [endpoint("127.0.0.1", ready=True, serving=True)], port=int(port))
    command = stack.commands["router"]
    options = ("--discovery", "kubernetes", "--kubernetes-api", api.url, "--kubernetes-service", "workers")
    first_static = command.index("--static-workers")
    assert set(command[first_static::2]) == {"--static-workers"}, "the static workers are its last options"
    stack.commands["router"] = (*command[:first_static], *options, "--kubernetes-namespace", "default")
    stack.processes["router"].terminate()
    stack.restart("router")
    deadline = time.monotonic() + 60
    while _num_ready(stack) < len(stack.workers):
        has_ended = stack.processes["router"].poll() is not None
        assert not has_ended, (stack.logs / "router.log").read_text()[-2000:]
        assert time.monotonic() < deadline, "the router does not see its endpoints"
        time.sleep(0.1)


def _num_ready(stack: RunningStack) -> float:
    try:
        return stack.total("router", "ostrya_router_workers_ready")
    except OSError:
        return 0


@contextmanager
def _device_plugin() -> Iterator[str]:
    """host:port that serves the synthetic exposition."""

    class Exposition(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(DEVICE_PLUGIN.read_bytes())

        def log_message(self, *_: object) -> None:
            """Nothing to say."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Exposition) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
