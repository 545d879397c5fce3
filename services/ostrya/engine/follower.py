"""Any rank but 0, a process of its own: `python -m ostrya.engine.follower`, started by what local_ranks.py names.

It dials host 0 for as long as it takes, loads its part of the model when all are there, and replays every plan, in
order. It plans nothing and chooses nothing: its tokens are those of rank 0, and it keeps them for the step after. It
ends with host 0, with its parent, or with its first error, at once and whatever it is doing.
"""

import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from typing import Never

import msgspec

from ostrya.engine import slice_wire as wire
from ostrya.engine.backends.base import Runner, StepHandle, factory_of
from ostrya.engine.handshake import identity, proof
from ostrya.engine.local_ranks import STATUS_S, Follow, Status
from ostrya.engine.plan import Bucket, StepPlan
from ostrya.engine.plan_codec import PlanDecoder, chosen
from ostrya.engine.world import World, ranks_per_host
from ostrya.errors import OstryaError

DIAL_S, MAX_PAUSE_S = 5.0, 2.0
GREETING_S = 10.0
SILENCE_S = 5.0
"""10 pings."""
START_SILENCE_S = 60.0
"""As in leader.py."""
IN_FLIGHT = 4
"""Steps that the device may have before it."""
MIN_BEAT_S = 0.05
"""Between two, so that rank 0 is not kept busy by them."""
BLAME_S = 0.5
MAX_REASON = 4096
"""Characters: the parent reads lines of 64 KiB at most."""
_PR_SET_PDEATHSIG = 1
LEADER_GONE, FAILED = 0, 1


@dataclass(slots=True)
class Progress:
    """What the beats tell."""

    phase: str = "dialling"
    beat: wire.Beat = wire.Beat(0, 0)  # noqa: RUF009 - frozen
    """Replaced as a whole, so that step and checksum belong together."""
    silent_s: float = 0.0
    """For how long host 0 has said nothing."""


class Follower:
    """One try: from dialling to the end of the process."""

    def __init__(self, follow: Follow, status: int) -> None:
        """`status`: descriptor for the lines to the parent."""
        self._follow, self._status = follow, status
        self._slice = follow.slice_
        self._per_host = ranks_per_host(follow.config, self._slice.num_hosts)
        self._progress = Progress()
        self._changed = threading.Event()
        self._sending, self._telling = threading.Lock(), threading.Lock()
        self._sock: socket.socket | None = None
        self._inbox: queue.SimpleQueue[wire.ToFollower | bytearray] = queue.SimpleQueue()
        """Bounded by host 0, which fails when we are thousands of steps behind."""
        self._launched: queue.SimpleQueue[tuple[StepHandle, StepPlan]] = queue.SimpleQueue()
        self._room = threading.BoundedSemaphore(IN_FLIGHT)

    def run(self) -> Never:
        """Never returns."""
        threading.Thread(target=self._tell_parent, name="status", daemon=True).start()
        try:
            self._replay(*self._join())
        except (EOFError, OSError) as error:
            self.end(_gone(error), LEADER_GONE)
        except BaseException as error:
            self._break(error)

    def end(self, why: str, code: int) -> Never:
        """At once: other threads may be stuck in a device."""
        self._progress.phase = "ended"
        self._tell(why)
        os._exit(code)

    def _join(self) -> tuple[Runner, PlanDecoder]:
        """Dials, shows who this is, waits for the others, loads."""
        who = identity(self._follow.config, self._follow.factory, self._slice)
        self._sock = sock = self._dial()
        sock.settimeout(GREETING_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = wire.receive(sock)
        if not isinstance(challenge, wire.Challenge):
            raise EOFError("what answers there is no host 0")
        shown = proof(self._slice.secret, challenge.nonce)
        process = f"{socket.gethostname()}, process {os.getpid()}"
        self._send(wire.Hello(wire.PROTOCOL, shown, self._slice.host, self._follow.local_rank, process, who))
        answer = wire.receive(sock)
        if isinstance(answer, wire.Refused):
            self.end(f"host 0 refuses this host: {answer.why}", FAILED)
        self._progress.phase = "joined"
        sock.settimeout(None)  # _beat looks after it
        threading.Thread(target=self._hear, args=(sock,), name="leader-reader", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        begin = self._inbox.get()
        assert isinstance(begin, wire.Begin)
        self._progress.phase = "loading"
        world = World(
            rank=self._slice.host * self._per_host + self._follow.local_rank,
            size=self._slice.num_hosts * self._per_host,
            rendezvous=begin.rendezvous,
            num_hosts=self._slice.num_hosts,
        )
        runner, _ = factory_of(self._follow.factory)(self._follow.config, world)
        self._progress.phase = "warming"
        self._send(wire.Loaded())
        return runner, PlanDecoder()

    def _replay(self, runner: Runner, decoder: PlanDecoder) -> Never:
        threading.Thread(target=self._finish_steps, name="step-waiter", daemon=True).start()
        while True:
            message = self._inbox.get()
            if isinstance(message, bytearray):
                plan = decoder.decode(message)
                self._room.acquire()
                self._launched.put((runner.execute(plan), plan))
            elif isinstance(message, wire.WarmUp):
                runner.warm_up([Bucket(*one) for one in message.buckets])
                self._progress.phase = "following"
                self._send(wire.Warm())

    def _finish_steps(self) -> None:
        try:
            while True:
                handle, plan = self._launched.get()
                tokens = handle.tokens()
                last = self._progress.beat
                self._progress.beat = wire.Beat(last.step + 1, zlib.crc32(chosen(tokens, plan), last.checksum))
                self._room.release()
                self._changed.set()
        except BaseException as error:
            self._break(error)

    def _dial(self) -> socket.socket:
        """Until somebody answers: host 0 may be starting, or gone for a long time."""
        pause_s = 0.05
        while True:
            try:
                return socket.create_connection((self._slice.leader, self._slice.port), DIAL_S)
            except OSError:
                time.sleep(pause_s)
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    def _hear(self, sock: socket.socket) -> None:
        try:
            while True:
                message = wire.receive(sock)
                self._progress.silent_s = 0.0
                if not isinstance(message, wire.Ping):
                    self._inbox.put(message)
        except (EOFError, OSError, ValueError) as error:
            self.end(_gone(error), LEADER_GONE)

    def _beat(self) -> None:
        """Tells host 0 how far we are, soon after each step and often enough without any; ends with a silent one."""
        looked_s = time.monotonic()
        while True:
            self._changed.wait(wire.BEAT_S)
            self._changed.clear()
            with contextlib.suppress(OSError):  # the reader sees it too
                self._send(self._progress.beat)
            time.sleep(MIN_BEAT_S)
            # What takes longer was our own pause.
            now_s = time.monotonic()
            self._progress.silent_s += min(now_s - looked_s, 2 * wire.BEAT_S)
            looked_s = now_s
            limit_s = SILENCE_S if self._progress.phase == "following" else START_SILENCE_S
            if self._progress.silent_s >= limit_s:
                self.end(f"host 0 was silent for {limit_s:.0f} s", LEADER_GONE)

    def _send(self, message: wire.ToLeader) -> None:
        assert self._sock is not None
        with self._sending:
            self._sock.sendall(wire.frame(message))

    def _fail(self, why: str) -> Never:
        why = " ".join(why.split())[:MAX_REASON]
        if self._sock is not None and self._sending.acquire(timeout=1.0):
            with contextlib.suppress(OSError):
                self._sock.sendall(wire.frame(wire.Failed(why)))
        self.end(why, FAILED)

    def _break(self, error: BaseException) -> Never:
        """Whatever a backend raises: a rank that missed a step must not go on. Where another rank is lost and ours only
        hears of it, or all fail alike, theirs is the better reason, and comes first."""
        time.sleep(BLAME_S)
        self._fail(str(error) if isinstance(error, OstryaError) else f"{type(error).__name__}: {error}")

    def _tell_parent(self) -> None:
        while True:
            self._tell()
            time.sleep(STATUS_S)

    def _tell(self, detail: str = "") -> None:
        status = Status(phase=self._progress.phase, step=self._progress.beat.step, detail=detail)
        with self._telling, contextlib.suppress(OSError):
            os.write(self._status, msgspec.json.encode(status) + b"\n")


def _gone(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"host 0 is gone: {error}"


def _ends_with(parent: int) -> None:
    """This process, with its parent: the kernel does it, and where there is none such, the end of standard input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(LEADER_GONE)

    def wait() -> None:
        while sys.stdin.buffer.read(1):
            pass
        os._exit(LEADER_GONE)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def main() -> Never:
    # The parent decides when this process ends; a Ctrl-C in the terminal reaches all of them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    status = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no status
    follow = msgspec.json.decode(sys.stdin.buffer.readline(), type=Follow)
    _ends_with(follow.parent)
    Follower(follow, status).run()


if __name__ == "__main__":
    main()
