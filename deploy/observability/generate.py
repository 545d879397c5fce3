"""Writes dashboards/*.json from boards/*.py. `python -m deploy.observability.generate [--check]`.

With --check nothing is written; the exit code is 1 if a file is not what the boards say.
"""

import argparse
import json
import sys
from pathlib import Path

from deploy.observability.boards import fleet_slo, lifecycle, routing, tpu_hardware, worker_engine
from deploy.observability.panels import board_json

BOARDS = {
    "fleet-slo": fleet_slo.BOARD,
    "routing": routing.BOARD,
    "worker-engine": worker_engine.BOARD,
    "tpu-hardware": tpu_hardware.BOARD,
    "lifecycle": lifecycle.BOARD,
}
"""By file name, in the order of the links."""

DIRECTORY = Path(__file__).parent / "dashboards"


def rendered() -> dict[Path, str]:
    """What every file should hold."""
    boards = list(BOARDS.values())
    return {
        DIRECTORY / f"{name}.json": json.dumps(board_json(board, boards), indent=2) + "\n"
        for name, board in BOARDS.items()
    }


def stale() -> list[Path]:
    """Files that are not what the boards say, or that no board writes."""
    expected = rendered()
    unknown = [path for path in DIRECTORY.glob("*.json") if path not in expected]
    return unknown + [path for path, text in expected.items() if not path.exists() or path.read_text() != text]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Write the dashboards' JSON.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is stale")
    if not parser.parse_args().check:
        for path, text in rendered().items():
            path.write_text(text)
    for path in stale():
        print(f"{path} is stale: run 'make dashboards'", file=sys.stderr)
    return 1 if stale() else 0


if __name__ == "__main__":
    sys.exit(main())
