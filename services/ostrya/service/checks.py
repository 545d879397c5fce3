"""Checks of settings that every service has. Each gives the problems it found, for ConfigError to show together."""

import math
import re
from urllib.parse import SplitResult, parse_qsl, urlsplit

_ADDRESS = re.compile(r"(?:[\w.-]+|\[[0-9a-f:.%\w]+\]):([0-9]{1,5})", re.ASCII | re.IGNORECASE)
LOG_LEVELS = ("debug", "info", "warning", "error")
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
"""What may follow the ? of a rediss:// URL. The client would take any word, and fail at its first connection."""
_CERT_REQS = ("required", "none")


def redis_url(url: str) -> list[str]:
    """redis://[user:password@]host[:port][/db], rediss:// (TLS) with options, or unix:///path[?db=0].

    A URL may hold a password, and a password may be taken for any part of it, so no problem repeats anything of it.
    """
    try:
        parts = urlsplit(url)
        port_is_given = parts.port is not None
        options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    except ValueError:
        return [f"redis_url cannot be read; {_ENCODE}"]
    if parts.scheme == "unix":
        known = parts.path and not port_is_given and options.keys() <= {"db"} and options.get("db", "0").isdecimal()
        return [] if known else ["redis_url must be like unix:///path/to/redis.sock or unix:///path?db=0"]
    if parts.scheme not in ("redis", "rediss"):
        return ["redis_url must begin with redis://, rediss:// (TLS) or unix://, as in redis://host:6379/0"]
    return [f"redis_url {problem}" for problem in (*_network(parts), *_options(parts.scheme, options))]


_ENCODE = "percent-encode / ? # @ and : in its user and password, as in redis://user:p%40ss@host:6379/0"


def _network(parts: SplitResult) -> list[str]:
    problems = []
    if not parts.hostname or parts.fragment or "@" in parts.path + parts.query:
        problems.append(f"has no host, or a # or a second @ in it; {_ENCODE}")
    if parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        problems.append(f"has no database number after its host; {_ENCODE}")
    return problems


def _options(scheme: str, options: dict[str, str]) -> list[str]:
    if scheme == "redis" and options:
        return ["has options after ?, which only rediss:// takes"]
    problems = []
    if not options.keys() <= set(_TLS_OPTIONS):
        problems.append(f"has an option after ? that is not one of {', '.join(_TLS_OPTIONS)}")
    if options.get("ssl_cert_reqs", "required") not in _CERT_REQS:
        problems.append(f"has an ssl_cert_reqs that is not one of {', '.join(_CERT_REQS)}")
    return problems


def log_level(level: str) -> list[str]:
    return [] if level in LOG_LEVELS else [f"log_level is {level!r}; it must be one of {', '.join(LOG_LEVELS)}"]


def host(value: str) -> list[str]:
    """The interface to listen on."""
    if value and not re.search(r"[\s/]", value):
        return []
    return [f"host is {value!r}; it must be the address of an interface, like 127.0.0.1, or 0.0.0.0 for every one"]


def port(name: str, value: int) -> list[str]:
    """A port to listen on. Not every library refuses others: gRPC listens on the rest of a division by 65536."""
    return [] if 0 <= value <= 65535 else [f"{name} is {value}; it must be 0 (any free port) to 65535"]


def is_address(text: str) -> bool:
    """host:port to dial."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match[1]) < 65536


def endpoint(name: str, url: str) -> list[str]:
    """[http[s]://]host:port, or an http URL that needs no port, as far as its port goes."""
    try:
        is_possible = urlsplit(url if "://" in url else f"//{url}").port != 0
    except ValueError:
        is_possible = False
    return [] if is_possible else [f"{name} is {url!r}; its port must be 1 to 65535"]


def seconds(name: str, value: float) -> list[str]:
    return [] if math.isfinite(value) and value >= 0 else [f"{name} is {value}; it must be finite and not negative"]
