"""Checks of settings that every service has. Each gives the problems it found, for ConfigError to show together."""

from urllib.parse import urlsplit

LOG_LEVELS = ("debug", "info", "warning", "error")
_REDIS_SCHEMES = ("redis", "rediss", "unix")


def redis_url(url: str) -> list[str]:
    """redis://, rediss:// (TLS) or unix://, with a host or a path."""
    parts = urlsplit(url)
    if parts.scheme in _REDIS_SCHEMES and (parts.netloc or parts.path):
        return []
    # The URL may hold a password.
    return [f"redis_url has the scheme {parts.scheme!r}; it must be like redis://host:6379/0 (or rediss://, unix://)"]


def log_level(level: str) -> list[str]:
    return [] if level in LOG_LEVELS else [f"log_level is {level!r}; it must be one of {', '.join(LOG_LEVELS)}"]
