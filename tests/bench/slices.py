"""What a step plan costs on its way to another host: bytes, and the time to encode it, send it over loopback and decode
it in another process. 256 decode rows of 8k tokens each. And in a whole replica of two ranks, how much later the other
one begins a step than rank 0. Run by `make bench-slices`.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from ostrya.engine import slice_wire as wire
from ostrya.engine.backends.base import StepHandle
from ostrya.engine.batch import RowTable, assemble
from ostrya.engine.buckets import ladder
from ostrya.engine.config import EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.kv.pool import PageId
from ostrya.engine.kv.prefix import Chain
from ostrya.engine.plan import StepPlan
from ostrya.engine.plan_codec import PlanDecoder, PlanEncoder
from ostrya.engine.replicas import load_replica
from ostrya.engine.sequence import Row, Sequence
from ostrya.engine.world import ALONE, ONE_HOST, World
from tests.bench.host import DEVICE_STEP_S, Model, NoDevice, config, request

GOAL_BYTES, GOAL_MS = 64 << 10, 1.0
NUM_ROWS, CONTEXT_TOKENS, PAGE_SIZE = 256, 8192, 16
NUM_WARM, NUM_MEASURED = 50, 400


def plans(num_rows: int) -> Iterator[StepPlan]:
    """One after another, of running rows that get a page every 16 steps, each at its own time."""
    pages_per_row = CONTEXT_TOKENS // PAGE_SIZE
    table = RowTable(num_slots=num_rows, pages_per_row=pages_per_row)
    shapes = ladder(max_running=num_rows, max_step_tokens=num_rows, page_size=PAGE_SIZE, context_tokens=CONTEXT_TOKENS)
    draw, start = np.random.default_rng(0), CONTEXT_TOKENS - NUM_WARM - NUM_MEASURED - PAGE_SIZE
    first = draw.permutation(num_rows * pages_per_row).astype(np.int32).reshape(num_rows, pages_per_row)
    slots = [
        table.take([PageId(page) for page in first[row, : start // PAGE_SIZE].tolist()], request(row).sampling)
        for row in range(num_rows)
    ]
    sequences = [_sequence(row, slot) for row, slot in enumerate(slots)]
    for step in range(NUM_WARM + NUM_MEASURED):
        rows = []
        for number, sequence in enumerate(sequences):
            at = start + step + number % PAGE_SIZE
            table.page_table[sequence.slot, at // PAGE_SIZE] = first[number, at // PAGE_SIZE]
            rows.append(Row(sequence, at, 1, True))
        yield assemble(rows, table=table, ladder=shapes, page_size=PAGE_SIZE)


def _sequence(row: int, slot: int) -> Sequence:
    return Sequence(
        request=request(row),
        chain=cast("Chain", None),
        token_ids=array("i"),
        num_prompt=0,
        num_tokens=0,
        max_num_tokens=CONTEXT_TOKENS,
        stop_token_ids=frozenset(),
        rank=(0, row),
        submitted_s=0.0,
        slot=slot,
        row=row,
    )


def receive(port: int) -> None:
    """The other process: says when it had each plan."""
    decoder = PlanDecoder()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        for _ in range(NUM_WARM + NUM_MEASURED):
            message = wire.receive(sock)
            assert isinstance(message, bytearray)
            decoder.decode(message)
            sock.sendall(time.monotonic_ns().to_bytes(8, "little"))


def measure(num_rows: int) -> tuple[int, float, float]:
    """Medians: bytes of a plan, milliseconds until the other process has it, and of them on the engine's thread."""
    sizes, taken_ms, own_ms, encoder = list[int](), list[float](), list[float](), PlanEncoder()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", "tests.bench.slices", "--receive", str(listener.getsockname()[1])]
        with subprocess.Popen(command) as other:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with sock:
                for plan in plans(num_rows):
                    began_ns = time.monotonic_ns()
                    frame = wire.plan_frame(encoder.encode(plan))
                    own_ms.append((time.monotonic_ns() - began_ns) / 1e6)
                    sock.sendall(frame)
                    taken_ms.append((int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "little") - began_ns) / 1e6)
                    sizes.append(len(frame))
            other.wait(10)
    return tuple(statistics.median(one[NUM_WARM:]) for one in (sizes, taken_ms, own_ms))  # type: ignore[return-value]


class TimedDevice(NoDevice):
    """Leaves the times at which its steps began in a file."""

    def __init__(self, report: Path) -> None:
        self._report, self._began_ns = report, list[int]()

    def execute(self, plan: StepPlan) -> StepHandle:
        self._began_ns.append(time.monotonic_ns())
        if len(self._began_ns) == NUM_WARM + NUM_MEASURED:
            self._report.write_text(json.dumps(self._began_ns[NUM_WARM:]))
        return super().execute(plan)


def load_timed_device(settings: EngineConfig, world: World = ALONE) -> tuple[TimedDevice, Model]:
    return TimedDevice(Path(settings.model_path) / f"{world.rank}.json"), Model()


def behind_ms(num_rows: int) -> float:
    """Of rank 1, in the median; a step every 4 ms."""
    with tempfile.TemporaryDirectory() as directory:
        settings = msgspec.structs.replace(config(num_rows, model_path=directory), tensor_parallel=2)
        runner, model = load_replica(
            settings, "tests.bench.slices:load_timed_device", ONE_HOST, end=sys.exit, waiting=print
        )
        engine = Engine(runner, settings, context_tokens=model.context_tokens, eos_token_ids=(2,))
        engine.warm_up()
        for index in range(num_rows):
            engine.submit(request(index))
        other = Path(directory) / "1.json"
        while not other.exists() or not other.stat().st_size:
            engine.step()
            time.sleep(DEVICE_STEP_S)
        runner.close()
        ours, theirs = (json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in (0, 1))
    behind: float = statistics.median((their - our) / 1e6 for our, their in zip(ours, theirs, strict=True))
    return behind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    parser.add_argument("--receive", type=int, metavar="PORT")
    options = parser.parse_args()
    if options.receive:
        receive(options.receive)
        return
    size, taken_ms, own_ms = measure(options.rows)
    print(
        f"{options.rows:4} rows  {size / 1024:.1f} KiB (goal {GOAL_BYTES >> 10}), {taken_ms:.3f} ms to another process "
        f"(goal {GOAL_MS}), {own_ms:.3f} ms of them on the engine's thread"
    )
    late_ms = behind_ms(options.rows)
    print(f"{options.rows:4} rows  the other rank begins a step {late_ms:.3f} ms after rank 0 (goal {GOAL_MS})")
    if size > GOAL_BYTES or max(taken_ms, late_ms) > GOAL_MS:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
