"""A router's settings: what `ostrya router` takes. Frozen; checked once, all problems at once."""

from dataclasses import dataclass
from typing import Literal

from ostrya.errors import ConfigError
from ostrya.service import checks, tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """One router in front of one pool."""

    model: str = "smollm2-135m-instruct"
    """Source of tokenizer and chat template: a .gguf file, a Hugging Face directory, or a known package's name."""
    model_name: str = ""
    """The served name; empty = the source's own."""
    pool: str = "default"
    host: str = "127.0.0.1"
    port: int = 50051
    """0 = any free port."""
    metrics_port: int = 0
    """0 = any free port."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    static_workers: tuple[str, ...] = ()
    """host:port of workers to use besides those in Redis; what remains when Redis is absent at start."""
    max_in_flight: int = 1024
    """Requests in this router; one more is RESOURCE_EXHAUSTED."""
    max_message_bytes: int = 8 << 20
    max_messages: int = 4096
    """Messages of one chat."""
    max_prompt_bytes: int = 4 << 20
    """UTF-8 bytes of a text, or of all messages of a chat; a token id counts 4. About a million tokens."""
    allow_special_tokens_in_content: bool = False
    """Whether a special token written in a chat message's content becomes that token. Off, nobody can forge a turn."""
    max_attempts: int = 3
    """Replicas that may fail a request in a row, without a token in between, before it fails with UNAVAILABLE."""
    discovery: Literal["registry", "kubernetes", "static"] = "registry"
    """Where replicas come from: members in Redis (and static workers), EndpointSlices, or static workers alone."""
    kubernetes_service: str = ""
    """The workers' headless Service, for discovery=kubernetes."""
    kubernetes_namespace: str = ""
    """Of that Service; empty = the pod's own."""
    kubernetes_api: str = ""
    """URL of the API server; empty = as a pod reaches it, with its service account."""
    kubernetes_ca_file: str = ""
    """Certificates (PEM) of the authority that signed that URL's; empty = the system's authorities."""
    kubernetes_token_file: str = ""
    """File with the bearer token for that URL, read again whenever it is used; empty = none."""
    maintenance: bool = False
    """Read the nodes' maintenance labels and taints (needs the right to watch nodes; discovery=kubernetes)."""
    maintenance_horizon_s: float = 600.0
    """From this long before a node's scheduled maintenance on, long requests go elsewhere."""
    long_request_tokens: int = 256
    """max_tokens from which a request is long."""
    no_replica_wait_s: float = 60.0
    """How long a request waits for a routable replica, within its deadline."""
    max_waiting: int = 512
    """Requests that may wait for one; one more is RESOURCE_EXHAUSTED."""
    farewell_s: float = 0.3
    """At the end: NOT_SERVING and still accepting, so that who balances by health looks away first."""
    drain_timeout_s: float = 30.0
    """At the end: how long running streams may take."""
    max_connection_age_s: float = 0.0
    """A client's connection is asked to reconnect after this, so that new routers get their share; 0 = never."""
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
        if self.max_in_flight < 1:
            problems.append(f"max_in_flight is {self.max_in_flight}; it must be at least 1")
        if self.max_attempts < 1:
            problems.append(f"max_attempts is {self.max_attempts}; it must be at least 1")
        if self.max_message_bytes < 1024:
            problems.append(f"max_message_bytes is {self.max_message_bytes}; it must be at least 1024")
        for name in ("max_messages", "max_prompt_bytes"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.long_request_tokens < 1:
            problems.append(f"long_request_tokens is {self.long_request_tokens}; it must be at least 1")
        if self.max_waiting < 0:
            problems.append(f"max_waiting is {self.max_waiting}; it must not be negative")
        spans = ("maintenance_horizon_s", "no_replica_wait_s", "farewell_s", "drain_timeout_s", "max_connection_age_s")
        for name in spans:
            problems += checks.seconds(name, getattr(self, name))
        wrong = [address for address in self.static_workers if not checks.is_address(address)]
        problems += [f"static worker {address!r} is not host:port" for address in wrong]
        problems += self._discovery_problems()
        if problems:
            raise ConfigError(problems)

    def _discovery_problems(self) -> list[str]:
        problems = []
        if self.discovery == "static" and not self.static_workers:
            problems.append("discovery is static and static_workers is empty; name at least one host:port")
        if self.discovery == "kubernetes":
            if not self.kubernetes_service:
                problems.append("discovery is kubernetes and kubernetes_service is empty; name the workers' Service")
            if self.static_workers:
                problems.append("static_workers are not used with discovery kubernetes; leave them out")
            if self.kubernetes_api and not self.kubernetes_api.startswith(("http://", "https://")):
                problems.append(f"kubernetes_api is {self.kubernetes_api!r}; it must be like https://host:6443")
            else:
                problems += checks.endpoint("kubernetes_api", self.kubernetes_api)
        elif self.maintenance:
            problems.append(f"maintenance needs discovery kubernetes, which tells the nodes; it is {self.discovery}")
        for name in ("kubernetes_ca_file", "kubernetes_token_file"):
            # A token must not be sent for everyone to read.
            if getattr(self, name) and not self.kubernetes_api.startswith("https://"):
                problems.append(
                    f"{name} needs a kubernetes_api like https://host:6443; it is {self.kubernetes_api!r} "
                    "(empty = the pod's own, with its service account)"
                )
        return problems
