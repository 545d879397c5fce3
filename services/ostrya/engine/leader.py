"""Rank 0's end of the channel to the other ranks of its replica: gathers them, sends to them, watches them.

It reads and watches in one thread with an event loop; the engine's thread sends, and never waits for a socket.
Once all are there a replica lives and dies as one: whatever goes wrong with a follower, `end` is told which and why,
and ends this process, for a collective that waits for a lost rank hangs in C code where no exception goes.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from threading import Lock, Thread

import msgspec

from ostrya.engine import slice_wire as wire
from ostrya.engine.config import EngineConfig
from ostrya.engine.handshake import identity
from ostrya.engine.joining import Joining, Peer, Phase
from ostrya.engine.local_ranks import COMMAND, first_line
from ostrya.engine.slice_link import Link
from ostrya.engine.world import Slice, World, ranks_per_host
from ostrya.errors import ModelLoadError, OstryaError

LOOK_S = 0.25
"""Between two looks at everybody. What takes longer than two of them was our own pause."""
SILENCE_S = 4.0
"""20 beats; with a look and a beat the whole replica has failed within 5 s."""
START_SILENCE_S = 60.0
"""While models are loaded and programs compiled: both may hold Python's lock for long."""
LAG_S = 4.0
"""A step that rank 0 has done is done by all others so much later, at the latest."""
MAX_AHEAD_STEPS = 4096
MAX_UNSENT_BYTES = 256 << 20
TELL_S = 10.0
GREETING_S = 10.0
BLAME_S = 1.0
"""For the loss of a rank to be noticed. Followers wait half as long before they say that they failed."""
MIN_PHASE_S = 120.0
PHASE_RATIO = 4.0
"""Others may take so much longer to load or to warm up than rank 0 did."""

End = Callable[[str], None]


class Leader:
    """Use it in this order: gather, reached(loaded), reached(warm), then plans. close() is for tests: a real one ends
    with its process."""

    def __init__(
        self, slice_: Slice, *, config: EngineConfig, factory: str, end: End, waiting: Callable[[str], None]
    ) -> None:
        """`waiting` hears every TELL_S who is not there yet; like `end` it is called in a thread of ours."""
        self._slice, self._config, self._factory = slice_, config, factory
        self._end, self._waiting = end, waiting
        self._per_host = ranks_per_host(config, slice_.num_hosts)
        self._joining = Joining(slice_, identity(config, factory, slice_), per_host=self._per_host)
        self._peers = self._joining.peers
        self._has_ended = False
        self._silence_s = START_SILENCE_S
        self._num_sent = 0
        self._num_done = self._checksum = 0
        self._done: dict[int, tuple[int, float]] = {}
        """Checksum and heard time, by step: of those that rank 0 has done and somebody else may not have."""
        self._heard_s = 0.0
        """What has passed while we listened: a process that was stopped blames nobody for it."""
        self._lock = Lock()
        """Of the three above."""
        self._local: list[subprocess.Popen[bytes]] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="slice-channel", daemon=True)

    # From the engine's thread.

    def gather(self) -> World:
        """Waits until every other rank has joined and is like us. ModelLoadError says who is missing, or what differs.

        From the process's main thread: the ranks of this host live as long as it.
        """
        deadline_s = time.monotonic() + self._slice.join_timeout_s
        listener = _listen(self._slice, deadline_s)
        address, port = listener.getsockname()[:2]
        self._thread.start()
        here = msgspec.structs.replace(self._slice, leader=address, port=port)
        for local_rank in range(1, self._per_host):
            self._local.append(_started(first_line(self._config, self._factory, here, local_rank)))
        rendezvous = f"{self._slice.leader}:{self._slice.port + 1 if self._slice.port else _free_port(address)}"
        gathering = self._gather(listener, deadline_s=deadline_s, rendezvous=rendezvous)
        asyncio.run_coroutine_threadsafe(gathering, self._loop).result()
        return World(rank=0, size=self._joining.size, rendezvous=rendezvous, num_hosts=self._slice.num_hosts)

    def reached(self, phase: Phase, *, own_s: float) -> None:
        """Waits until the others have done so too; rank 0 took `own_s`."""
        limit_s = max(MIN_PHASE_S, PHASE_RATIO * own_s)
        asyncio.run_coroutine_threadsafe(self._reached(phase, limit_s), self._loop).result()

    def tell(self, message: wire.ToFollower) -> None:
        self._send(wire.frame(message))

    def send_plan(self, plan: bytes) -> int:
        """The number of its step, from 1."""
        self._num_sent += 1
        self._send(wire.plan_frame(plan))
        return self._num_sent

    def done(self, step: int, tokens: bytes) -> None:
        """Rank 0 has done it. Steps in order; a repetition is ignored."""
        with self._lock:
            if step == self._num_done + 1:
                self._num_done = step
                self._checksum = zlib.crc32(tokens, self._checksum)
                self._done[step] = self._checksum, self._heard_s

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """Around what rank 0 does together with the others: where it fails because one of them is lost, that one is
        named, and not what the loss did to us."""
        try:
            yield
        except OstryaError:
            raise
        except Exception:
            time.sleep(BLAME_S)
            raise

    def close(self) -> None:
        """Hangs up on everybody."""
        self._has_ended = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        for process in self._local:
            process.kill()
            process.wait()

    # In the loop's thread.

    def _run(self) -> None:
        watching = self._loop.create_task(self._watch())
        try:
            self._loop.run_forever()
        finally:
            tasks = [watching, *self._serving]
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    async def _gather(self, listener: socket.socket, *, deadline_s: float, rendezvous: str) -> None:
        joining, tell_at_s = self._joining, time.monotonic() + TELL_S
        accepting = self._loop.create_task(self._accept(listener))
        try:
            while not joining.is_complete:
                if joining.different:
                    raise ModelLoadError(joining.different)
                if time.monotonic() > deadline_s:
                    raise ModelLoadError(joining.missing(f"did not join within {self._slice.join_timeout_s:.0f} s"))
                if time.monotonic() > tell_at_s:
                    tell_at_s += TELL_S
                    self._waiting(f"waiting for {joining.missing()}")
                for process in self._local:
                    if process.poll() is not None:
                        how = f"ended with code {process.returncode} before it joined"
                        raise ModelLoadError(f"a process of this host {how}; see the lines above")
                await asyncio.sleep(LOOK_S / 5)
            joining.is_over = True
        finally:
            accepting.cancel()
            await asyncio.wait({accepting})
            listener.close()
        self._send(wire.frame(wire.Begin(rendezvous)))

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(listener)
            except OSError:  # out of descriptors, or a connection that ended too soon
                await asyncio.sleep(LOOK_S)
                continue
            task = self._loop.create_task(self._serve(Link(sock, self._loop)))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, link: Link) -> None:
        """One connection, whoever it is, to its end."""
        try:
            try:
                async with asyncio.timeout(GREETING_S):
                    peer = await self._greet(link)
            except (EOFError, OSError, ValueError, TimeoutError) as error:
                self._joining.dropped = f"a connection from {link.source} was dropped: {_words(error)}"
                return
            if peer is not None:
                await self._hear(peer)
        finally:
            link.close()

    async def _greet(self, link: Link) -> Peer | None:
        nonce = os.urandom(32)
        link.send(wire.frame(wire.Challenge(wire.PROTOCOL, nonce)))
        hello = await link.read()
        if not isinstance(hello, wire.Hello):
            raise ValueError("it did not say who it is")
        if refusal := self._joining.refusal(hello, nonce):
            link.send(wire.frame(wire.Refused(refusal)))
            self._joining.dropped = f"{hello.name[:100]!a} was refused: {refusal}"
            return None
        link.send(wire.frame(wire.Welcome()))
        return self._joining.welcome(hello, link)

    async def _hear(self, peer: Peer) -> None:
        why = "closed the connection: its process ended"
        try:
            while True:
                message = await peer.link.read()
                peer.silent_s = 0.0
                match message:
                    case wire.Beat(step):
                        peer.step = step
                        peer.beats.append(message)
                    case wire.Loaded():
                        peer.reached.add("loaded")
                    case wire.Warm():
                        peer.reached.add("warm")
                    case wire.Failed(reason):
                        why = f"failed: {reason}"
                        break
                    case wire.Hello():
                        raise ValueError("a second Hello")
        except ValueError as error:
            why = f"sent what is no message: {error}"
        except (EOFError, OSError):
            pass
        self._lose(peer, why)

    def _lose(self, peer: Peer, why: str) -> None:
        if self._joining.is_over:
            self._fail(f"{peer.name} {why}")
        else:
            self._joining.leave(peer, why)

    def _fail(self, why: str) -> None:
        if not self._has_ended:
            self._has_ended = True
            for process in self._local:
                process.kill()
            self._end(f"the replica fails whole: {why}")

    def _send(self, frame: bytes) -> None:
        """From any thread."""
        for peer in self._peers.values():
            peer.link.send(frame)

    async def _reached(self, phase: Phase, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while missing := [peer.name for peer in self._peers.values() if phase not in peer.reached]:
            if time.monotonic() > deadline_s:
                self._fail(f"{', '.join(missing)} not {phase} {limit_s:.0f} s after host 0")
                return
            await asyncio.sleep(LOOK_S / 5)
        if phase == "warm":
            self._silence_s = SILENCE_S

    async def _watch(self) -> None:
        try:
            looked_s, pinged_s = time.monotonic(), 0.0
            while True:
                await asyncio.sleep(LOOK_S)
                now_s = time.monotonic()
                heard_s, looked_s = min(now_s - looked_s, 2 * LOOK_S), now_s
                self._heard_s += heard_s
                if now_s - pinged_s >= wire.PING_S:
                    pinged_s = now_s
                    self._send(wire.frame(wire.Ping()))
                for peer in list(self._peers.values()):
                    self._look(peer, heard_s)
                self._forget()
        except Exception as error:
            self._fail(f"the channel to the other hosts broke: {error!r}")
            raise

    def _look(self, peer: Peer, heard_s: float) -> None:
        peer.silent_s += heard_s
        if peer.silent_s >= self._silence_s:
            self._lose(peer, f"was silent for {peer.silent_s:.1f} s")
        if peer.link.num_unsent_bytes > MAX_UNSENT_BYTES:
            self._fail(f"{peer.name} does not take its plans: {MAX_UNSENT_BYTES >> 20} MiB wait for it")
        with self._lock:
            num_done, (_, since_s) = self._num_done, self._done.get(peer.step + 1, (0, self._heard_s))
        if self._heard_s - since_s >= LAG_S or self._num_sent - peer.step > MAX_AHEAD_STEPS:
            self._fail(f"{peer.name} lags: it has done step {peer.step} of {num_done}")
        while peer.beats and peer.beats[0].step <= num_done:
            beat = peer.beats.popleft()
            if beat.step and beat.step in self._done and self._done[beat.step][0] != beat.checksum:
                self._fail(f"{peer.name} chose other tokens than rank 0, in step {beat.step} or before")

    def _forget(self) -> None:
        """Steps that nobody will be asked about any more."""
        with self._lock:
            oldest = min((peer.step for peer in self._peers.values()), default=self._num_done)
            for step in [one for one in self._done if one < oldest]:
                del self._done[step]


def _listen(slice_: Slice, deadline_s: float) -> socket.socket:
    """On the address that the others dial and on no other. The name of a host may be known a while after its start."""
    while True:
        try:
            family, kind, _, _, address = socket.getaddrinfo(slice_.leader, slice_.port, type=socket.SOCK_STREAM)[0]
            with contextlib.ExitStack() as stack:
                listener = stack.enter_context(socket.socket(family, kind))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen()
                listener.setblocking(False)
                stack.pop_all()
                return listener
        except OSError as error:
            if time.monotonic() > deadline_s or not isinstance(error, socket.gaierror):
                raise ModelLoadError(
                    f"cannot await the other hosts on {slice_.leader}:{slice_.port}: {error.strerror}"
                ) from error
            time.sleep(LOOK_S)


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _started(line: bytes) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()
    return process


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it said nothing for {GREETING_S:.0f} s"
    return "it hung up" if isinstance(error, EOFError | OSError) else str(error)
