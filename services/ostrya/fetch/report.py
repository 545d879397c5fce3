"""What `ostrya fetch` leaves for the worker that starts after it: one JSON file a phase, in a shared directory."""

import logging
from pathlib import Path
from typing import Literal, get_args

import msgspec

log = logging.getLogger(__name__)

Phase = Literal["fetch_model", "fetch_compile_cache"]
Result = Literal["hit", "miss"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class StartReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one phase went. Kept by the pod, so a restarted container shows the phases of its pod's start."""

    phase: Phase
    result: Result
    """fetch_model: hit = it was there already. fetch_compile_cache: hit = there is one now, miss = none was found."""
    seconds: float
    bytes: int
    """Of what is there now."""


def write(directory: Path, report: StartReport) -> None:
    """Replaces the phase's report; a reader never sees half of one."""
    directory.mkdir(parents=True, exist_ok=True)
    written = directory / f".{report.phase}.json"
    written.write_bytes(msgspec.json.encode(report))
    written.rename(directory / f"{report.phase}.json")


def read(directory: Path) -> list[StartReport]:
    """Those that are there; one that cannot be read is left out and logged, because no worker fails over it."""
    found = []
    for phase in PHASES:
        path = directory / f"{phase}.json"
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=StartReport))
        except FileNotFoundError:
            continue
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("start report cannot be read", extra={"fields": {"path": str(path), "error": str(error)}})
    return found
