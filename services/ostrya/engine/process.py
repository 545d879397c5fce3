"""The parent's side of the engine process: start it, send it requests, hand out what it says. Used by worker/.

One task reads the child's frames and gives each output to its request. When the socket ends, whatever the reason,
every open request fails with EngineDied and `dead` says why. Nothing here judges whether a child hangs, or starts
another: that is worker/lasting.py.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable
from typing import Self

import msgspec

from ostrya.engine import wire
from ostrya.engine.backends.xla_versions import installation_problem
from ostrya.engine.config import EngineConfig
from ostrya.engine.types import EngineInfo, EngineRequest, Load, RequestId, SequenceOutput, StepReport
from ostrya.engine.world import ONE_HOST, Slice
from ostrya.errors import EngineDied, InvalidRequest, ModelLoadError, OstryaError, Overloaded, Unavailable

log = logging.getLogger(__name__)

RUNNER_FACTORIES = {
    "cpu": "ostrya.engine.backends.cpu:load_runner",
    "xla": "ostrya.engine.backends.xla:load_runner",
    "torchtpu": "ostrya.engine.backends.torchtpu:load_runner",
    "roofline": "ostrya.engine.backends.roofline:load_runner",
}
"""By EngineConfig.backend; named and not imported, because torch stays in the child."""
START_LIMIT_S = 3600.0
"""Weights and a cold compile of every bucket take half an hour on a TPU; a supervisor's own limit comes before this."""
JOIN_RATIO = 0.75
"""Of the time to start, for the other hosts to join."""
EXIT_LIMIT_S = 1.0
"""How long a child may take to notice its closed socket."""
KILL_LIMIT_S = 10.0
"""How long the kernel may take to end a killed child: a device driver can hold it for ever."""
STDERR_FD = 2
_LIKELY_END = {
    "torchtpu": "torch_tpu ends its process where it cannot use libtpu or the TPU: another process may hold the TPU, "
    "or libtpu is not the one that torch-tpu was made for; "
}
"""By EngineConfig.backend: why it ends without a word."""


class _Stream:
    """Outputs of one request that its consumer has not taken yet, merged into one: bounded by max_tokens."""

    __slots__ = ("_changed", "_error", "_pending")

    def __init__(self) -> None:
        self._pending: SequenceOutput | None = None
        self._error: OstryaError | None = None
        self._changed: asyncio.Future[None] | None = None

    def put(self, output: SequenceOutput) -> None:
        self._pending = output if self._pending is None else _merged(self._pending, output)
        self._wake()

    def fail(self, error: OstryaError) -> None:
        self._error = error
        self._wake()

    def take(self) -> SequenceOutput | None:
        """What came since the last time; once there is none left, raises what fail() was given."""
        output, self._pending = self._pending, None
        if output is None and self._error is not None:
            raise self._error
        return output

    def changed(self) -> "asyncio.Future[None]":
        """Done with the next put() or fail(). For one consumer, who has just taken all there was; a future and not an
        event, because every stream waits once a step."""
        self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


def _merged(first: SequenceOutput, second: SequenceOutput) -> SequenceOutput:
    """What the first token tells is in `first`, how it ended in `second`."""
    return msgspec.structs.replace(
        first,
        token_ids=first.token_ids + second.token_ids,
        finish_reason=second.finish_reason,
        scores=first.scores + second.scores,
    )


class EngineProcess:
    """A running engine. Create it with start(); end it with close()."""

    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        info: EngineInfo,
        *,
        max_waiting: int,
    ) -> None:
        self.info = info
        self.load = Load()
        """The newest."""
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Says how it ended, once it has; close() ends it too."""
        self._process = process
        self._writer = writer
        self._max_open = info.max_running + max_waiting
        self._listeners: list[Callable[[StepReport], None]] = []
        self._streams: dict[RequestId, _Stream] = {}
        self._why_killed = self._last_word = ""
        self._reading = asyncio.create_task(self._read(reader), name="engine-reader")

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        max_waiting: int = 256,
        factory: str | None = None,
        slice_: Slice = ONE_HOST,
        vocabulary: Callable[[], list[bytes]] = list,
        timeout_s: float = START_LIMIT_S,
    ) -> Self:
        """Starts the child and waits until it is warm. ModelLoadError with one line if it cannot serve the model.

        `factory` ("module:function") replaces the backend's own. `slice_`: the hosts of this replica, of which this is
        the first; who is missing among them is said before `timeout_s`. `vocabulary` says what each token spells, for
        grammars; it is called in a thread, while the child loads. A cancel leaves no child behind.
        """
        factory = factory or factory_name(config)
        slice_ = msgspec.structs.replace(slice_, join_timeout_s=min(slice_.join_timeout_s, JOIN_RATIO * timeout_s))
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "ostrya.engine.child", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=STDERR_FD,
                # Where torch_tpu is installed, `import torch` would load it: that is its own backend's to do.
                env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            start = wire.Start(config, factory, slice_)
            writer.write(wire.frame(start))
            async with asyncio.timeout(timeout_s):
                writer.write(wire.frame(wire.Vocabulary(await asyncio.to_thread(vocabulary))))
                info = await _first_answer(reader, process, config)
        except TimeoutError as error:
            await _end(process, writer)
            raise ModelLoadError(f"engine was not ready after {timeout_s:.0f} s") from error
        except BaseException:
            await _end(process, writer)
            raise
        return cls(process, reader, writer, info, max_waiting=max_waiting)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_open(self) -> int:
        """Requests submitted and not ended."""
        return len(self._streams)

    def listen(self, listener: Callable[[StepReport], None]) -> None:
        """`listener` is called on the event loop with every report from now on; it must not block or raise."""
        self._listeners.append(listener)

    async def submit(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        """Runs a request; the last output has a finish_reason. Closing or cancelling the iteration aborts it at once.

        Raises at the first step of the iteration Overloaded (queue full) or InvalidRequest (can never finish), and at
        any step EngineDied, or what abort() was given.
        """
        if self._why_killed or self.dead.done():
            raise EngineDied(self._why_killed or self.dead.result())
        if len(self._streams) >= self._max_open:
            raise Overloaded(
                f"{self._max_open} requests are open here, which is the limit", retry_after_s=self._backlog_s()
            )
        request_id = request.request_id
        stream = self._streams[request_id] = _Stream()
        self._send(wire.Submit(request))
        try:
            finished = False
            while not finished:
                while (output := stream.take()) is None:
                    await stream.changed()
                finished = output.finish_reason is not None
                yield output
        finally:
            if self._streams.pop(request_id, None) is not None:
                self._send(wire.Abort(request_id))

    def abort(self, request_id: RequestId, error: OstryaError | None = None) -> None:
        """Ends a request in the engine at once; whoever iterates over it gets `error`. An unknown id is ignored."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._send(wire.Abort(request_id))
            stream.fail(error or Unavailable(f"request {request_id} was aborted"))

    def kill(self, why: str) -> None:
        """Ends a child that hangs. Every open request fails now; listeners hear no more; `dead` follows."""
        if self._why_killed or self.dead.done():
            return
        self._why_killed = why
        self._listeners.clear()
        self._fail_open(why)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._writer.transport.abort()  # it takes no more of what is still to be written

    @property
    def is_gone(self) -> bool:
        """The kernel has ended it: its device and memory are free."""
        return self._process.returncode is not None

    async def close(self) -> None:
        """Ends the child and fails what is still open; a cancel does not stop that. Safe to call twice."""
        self._writer.transport.abort()
        # The reader ends the child: to kill it twice can take its exit code from who waits for it.
        await asyncio.shield(self._reading)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(await wire.read(reader))
        except (EOFError, OSError):
            pass
        finally:
            how = await _end(self._process, self._writer)
            reason = f"{self._why_killed or self._last_word or 'engine process ended'} ({how})"
            if not self.dead.done():
                self.dead.set_result(reason)
            self._fail_open(reason)

    def _take(self, message: wire.ToParent) -> None:
        match message:
            case wire.Report(report):
                self.load = report.load
                for listener in self._listeners:
                    listener(report)
                for output in report.outputs:
                    # An aborted request may have one output on its way.
                    if (stream := self._streams.get(output.request_id)) is not None:
                        stream.put(output)
                        if output.finish_reason is not None:
                            del self._streams[output.request_id]
            case wire.Refused(request_id, field, value, allowed):
                if (stream := self._streams.pop(request_id, None)) is not None:
                    stream.fail(InvalidRequest(field, value, allowed))
            case wire.Fatal(why):
                self._last_word = why

    def _send(self, message: wire.Submit | wire.Abort) -> None:
        # Not drained: the limit of open requests bounds what can pile up.
        if not self._writer.is_closing():
            self._writer.write(wire.frame(message))

    def _backlog_s(self) -> float:
        """How long until the queue has moved, as far as it is known: between 0.1 s and 10 s."""
        rate = self.load.prefill_tokens_per_s
        return min(10.0, max(0.1, self.load.queued_tokens / rate)) if rate else 1.0

    def _fail_open(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.fail(EngineDied(reason))
        self._streams.clear()


def factory_name(config: EngineConfig) -> str:
    """The backend's own; ModelLoadError if what it needs is not installed."""
    if config.backend == "xla" and (problem := installation_problem()):
        raise ModelLoadError(problem)
    return RUNNER_FACTORIES[config.backend]


async def _first_answer(reader: asyncio.StreamReader, process: Process, config: EngineConfig) -> EngineInfo:
    try:
        while isinstance(answer := await wire.read(reader), wire.Waiting | wire.Log):
            if isinstance(answer, wire.Waiting):
                log.info(answer.words)
            else:
                logging.getLogger(answer.logger).log(answer.level, answer.message, extra={"fields": answer.fields})
    except (EOFError, OSError) as error:
        code = await process.wait()
        likely = _LIKELY_END.get(config.backend, "")
        raise ModelLoadError(
            f"engine process ended with code {code} before it was ready; {likely}see the lines above"
        ) from error
    if isinstance(answer, wire.Fatal):
        raise ModelLoadError(answer.message)
    assert isinstance(answer, wire.Ready)
    return answer.info


async def _end(process: Process, writer: asyncio.StreamWriter) -> str:
    """Closes the socket, which ends the child; kills it if that does not. Returns how it ended."""
    # Closing would wait until the child has read all that was written, and one that hangs never does.
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    try:
        async with asyncio.timeout(EXIT_LIMIT_S):
            code = await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        try:
            async with asyncio.timeout(KILL_LIMIT_S):
                code = await process.wait()
        except TimeoutError:
            return f"still there {KILL_LIMIT_S:.0f} s after SIGKILL"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
