"""Which host of its replica a worker is: from its settings, or from what LeaderWorkerSet and GKE tell every pod.

Takes the environment as an argument. The engine's Slice is the answer; host 0 serves, the others follow it.
"""

from collections.abc import Mapping
from pathlib import Path

from ostrya.engine.world import Slice
from ostrya.errors import ConfigError
from ostrya.worker.settings import WorkerSettings

LEADER_ADDRESS, GROUP_SIZE, WORKER_INDEX = _LWS = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
"""https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/"""
TPU_ID, TPU_HOSTS = _TPU = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
"""Set by GKE's webhook for TPU slices, and by that of LeaderWorkerSet."""


def role(settings: WorkerSettings, environment: Mapping[str, str]) -> Slice:
    """This worker's place. ConfigError when the environment is half set or says two things, or the secret cannot be
    read."""
    if settings.hosts is not None:
        found = Slice(host=settings.host_index or 0, num_hosts=settings.hosts, leader=settings.leader_address)
    else:
        found = _of_environment(environment)
    if found.num_hosts == 1:
        return Slice()
    return Slice(
        host=found.host,
        num_hosts=found.num_hosts,
        leader=found.leader,
        port=settings.slice_port,
        names=found.names,
        secret=_secret(settings.slice_secret_file),
        join_timeout_s=settings.join_timeout_s,
    )


def _of_environment(environment: Mapping[str, str]) -> Slice:
    by_lws, by_tpu = _of_lws(environment), _of_tpu(environment)
    if by_lws is None or by_tpu is None:
        return by_lws or by_tpu or Slice()
    if (by_lws.host, by_lws.num_hosts) != (by_tpu.host, by_tpu.num_hosts):
        raise ConfigError(
            [
                f"{WORKER_INDEX} and {GROUP_SIZE} say host {by_lws.host} of {by_lws.num_hosts}, {TPU_ID} and "
                f"{TPU_HOSTS} host {by_tpu.host} of {by_tpu.num_hosts}; correct them, or set --hosts, --host-index "
                "and --leader-address"
            ]
        )
    return by_lws


def _of_lws(environment: Mapping[str, str]) -> Slice | None:
    if not _has_all(environment, _LWS):
        return None
    leader = environment[LEADER_ADDRESS]
    num_hosts = _number(environment, GROUP_SIZE, 1, None)
    pod = leader.partition(".")[0]
    # The pods of a group are named after its first one; an address has no name.
    names = () if pod.isdigit() else (pod, *(f"{pod}-{index}" for index in range(1, num_hosts)))
    return Slice(
        host=_number(environment, WORKER_INDEX, 0, num_hosts - 1), num_hosts=num_hosts, leader=leader, names=names
    )


def _of_tpu(environment: Mapping[str, str]) -> Slice | None:
    if not _has_all(environment, _TPU):
        return None
    names = tuple(name.strip() for name in environment[TPU_HOSTS].split(","))
    if not all(names):
        raise ConfigError([f"{TPU_HOSTS} is {environment[TPU_HOSTS]!r}; it must be names with commas between them"])
    host = _number(environment, TPU_ID, 0, len(names) - 1)
    return Slice(host=host, num_hosts=len(names), leader=names[0], names=names)


def _has_all(environment: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """False if it has none. ConfigError if it has some."""
    missing = [name for name in names if not environment.get(name)]
    if missing and len(missing) < len(names):
        there = [name for name in names if name not in missing]
        raise ConfigError([f"{' and '.join(there)} is set but not {' and '.join(missing)}; set all of them or none"])
    return not missing


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    text = environment[name]
    if text.isascii() and text.isdigit() and least <= int(text) <= (int(text) if most is None else most):
        return int(text)
    allowed = f"at least {least}" if most is None else f"{least} to {most}"
    raise ConfigError([f"{name} is {text!r}; it must be a number, {allowed}"])


def _secret(path: str) -> str:
    try:
        return Path(path).read_text().strip() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"slice_secret_file {path} cannot be read: {error}"]) from error
