"""What a step plan costs on its way to another host: bytes, and the time to encode it, send it over loopback and decode
it in another process. 256 decode rows of 8k tokens each. Run by `make bench-slices`.
"""

import argparse
import socket
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from typing import cast

import numpy as np

from ostrya.engine import slice_wire as wire
from ostrya.engine.batch import RowTable, assemble
from ostrya.engine.buckets import ladder
from ostrya.engine.kv.pool import PageId
from ostrya.engine.kv.prefix import Chain
from ostrya.engine.plan import StepPlan
from ostrya.engine.plan_codec import PlanDecoder, PlanEncoder
from ostrya.engine.sequence import Row, Sequence
from tests.bench.host import request

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
    if size > GOAL_BYTES or taken_ms > GOAL_MS:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
