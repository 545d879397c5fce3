"""A worker's settings: what `ostrya worker` takes. Frozen; checked once, all problems at once."""

from dataclasses import dataclass

from ostrya.errors import ConfigError
from ostrya.service import checks, tracing
from ostrya.state.keys import MAX_WORKER_ID, is_worker_id

_EVERY_INTERFACE = ("0.0.0.0", "[::]", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One replica of a pool. Engine settings are separate: engine/config.py."""

    worker_id: str
    """Unique in the pool, stable over restarts (a StatefulSet pod's name)."""
    pool: str = "default"
    host: str = "127.0.0.1"
    port: int = 0
    """0 = any free port."""
    advertise_address: str = ""
    """host:port that routers dial; empty = host and the bound port. Needed when host is every interface."""
    metrics_port: int = 0
    """0 = any free port."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    max_waiting: int = 256
    """Requests accepted and not yet scheduled; one more is RESOURCE_EXHAUSTED."""
    max_message_bytes: int = 8 << 20
    """A 128k-token prompt is below 0.5 MiB."""
    drain_timeout_s: float = 30.0
    hosts: int | None = None
    """Hosts of this replica's slice; unset = as LeaderWorkerSet or GKE say in the environment, else 1."""
    host_index: int | None = None
    """Which of them this is, with hosts: 0 serves, the others follow it."""
    leader_address: str = ""
    """Name or address of host 0 for the others, with hosts; only there it awaits them."""
    slice_port: int = 50053
    """Where host 0 awaits the others; collectives may meet at the next one."""
    slice_secret_file: str = ""
    """A file with what the hosts of this slice know and no stranger does; empty = the network keeps strangers out."""
    join_timeout_s: float = 300.0
    """How long host 0 waits for the others before it ends and says who is missing."""
    start_report_dir: str = ""
    """Where `ostrya fetch` left its reports; they become start-up phases in the metrics. Empty = none."""
    metric_aliases: bool = False
    """Also export the names that vLLM's dashboards and the Gateway API inference extension read."""
    otlp_endpoint: str = ""
    """host:port of an OTLP gRPC collector for traces; empty = none. Needs the extra `tracing`."""
    log_level: str = "info"

    def check(self) -> None:
        """ConfigError with every problem."""
        problems = [*checks.redis_url(self.redis_url), *checks.log_level(self.log_level)]
        problems += tracing.problems(self.otlp_endpoint) or checks.endpoint("otlp_endpoint", self.otlp_endpoint)
        problems += checks.host(self.host)
        for name in ("port", "metrics_port"):
            problems += checks.port(name, getattr(self, name))
        if not self.worker_id:
            problems.append("worker_id is empty; give each replica its own")
        elif not is_worker_id(self.worker_id):
            shown = ascii(self.worker_id[:MAX_WORKER_ID])
            problems.append(
                f"worker_id is {shown}; it must be 1 to {MAX_WORKER_ID} printable ASCII characters without spaces"
            )
        if "/" in self.worker_id + self.pool or "{" in self.worker_id + self.pool or "}" in self.worker_id + self.pool:
            problems.append(
                f"pool {self.pool!r} or worker_id {self.worker_id!r} has one of / {{ }}, which Redis keys use"
            )
        if self.host in _EVERY_INTERFACE and not self.advertise_address:
            problems.append(f"host is {self.host}, which nobody can dial; set advertise_address to what routers dial")
        if self.advertise_address and not checks.is_address(self.advertise_address):
            problems.append(f"advertise_address is {self.advertise_address!r}; it must be host:port")
        if self.max_waiting < 1:
            problems.append(f"max_waiting is {self.max_waiting}; it must be at least 1")
        if self.max_message_bytes < 1024:
            problems.append(f"max_message_bytes is {self.max_message_bytes}; it must be at least 1024")
        problems += [*checks.seconds("drain_timeout_s", self.drain_timeout_s), *self._slice_problems()]
        if problems:
            raise ConfigError(problems)

    def _slice_problems(self) -> list[str]:
        problems = [*checks.port("slice_port", self.slice_port), *checks.seconds("join_timeout_s", self.join_timeout_s)]
        if self.hosts is None:
            problems += [
                f"{name} is set but not hosts; set hosts, or leave the role to the environment"
                for name in ("host_index", "leader_address")
                if getattr(self, name) not in (None, "")
            ]
        elif self.hosts < 1:
            problems.append(f"hosts is {self.hosts}; it must be at least 1")
        elif self.hosts > 1:
            if self.host_index is None or not self.leader_address:
                problems.append(f"hosts is {self.hosts}; it needs host_index and leader_address too")
            elif not 0 <= self.host_index < self.hosts:
                problems.append(f"host_index is {self.host_index}; it must be 0 to {self.hosts - 1}")
            if not 1 <= self.slice_port <= 65534:
                problems.append(f"slice_port is {self.slice_port}; with several hosts it must be 1 to 65534")
        return problems
