"""A router's settings: what `ostrya router` takes. Frozen; checked once, all problems at once."""

from dataclasses import dataclass

from ostrya.errors import ConfigError
from ostrya.service import checks


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
    max_attempts: int = 3
    """Replicas that may fail a request in a row, without a token in between, before it fails with UNAVAILABLE."""
    no_replica_wait_s: float = 5.0
    """How long a request waits for a first routable replica, within its deadline."""
    drain_timeout_s: float = 30.0
    log_level: str = "info"

    def check(self) -> None:
        """ConfigError with every problem."""
        problems = [*checks.redis_url(self.redis_url), *checks.log_level(self.log_level)]
        if self.max_in_flight < 1:
            problems.append(f"max_in_flight is {self.max_in_flight}; it must be at least 1")
        if self.max_attempts < 1:
            problems.append(f"max_attempts is {self.max_attempts}; it must be at least 1")
        if self.max_message_bytes < 1024:
            problems.append(f"max_message_bytes is {self.max_message_bytes}; it must be at least 1024")
        waits = {"no_replica_wait_s": self.no_replica_wait_s, "drain_timeout_s": self.drain_timeout_s}
        problems += [f"{name} is {value}; it must not be negative" for name, value in waits.items() if not value >= 0]
        problems += [
            f"static worker {address!r} is not host:port"
            for address in self.static_workers
            if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit()
        ]
        if problems:
            raise ConfigError(problems)
