"""The engine's own process: `python -m ostrya.engine.child FD`, started by engine/process.py.

The main thread owns the engine. Everything else reaches it through one mailbox: the parent's messages, put there by a
reader thread, and the end of a step, put there by a waiter thread; so requests and aborts are handled while a step
runs. It lives as long as its socket.
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, Never

import msgspec

from ostrya.engine import wire
from ostrya.engine.backends.base import StepHandle
from ostrya.engine.compiling import Compiled, Compiling
from ostrya.engine.config import AUTO_PAGES, EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.grammar import FIELD, Grammars, Matcher
from ostrya.engine.replicas import load_replica
from ostrya.engine.types import EngineInfo, EngineRequest, RequestId, StepReport
from ostrya.errors import InvalidRequest, ModelLoadError, OstryaError

LAST_WORD_S = 0.5
"""For the frame that is just being sent to get out of the way."""


class Parent:
    """The parent's end: the engine's thread sends, and whoever finds that the process must end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, message: wire.ToParent) -> None:
        with self._sending:
            self._sock.sendall(wire.frame(message))

    def end(self, why: str) -> Never:
        """Says why, if the parent still listens, and ends the process, whatever its threads are stuck in."""
        if self._sending.acquire(timeout=LAST_WORD_S):
            with contextlib.suppress(OSError):
                self._sock.send(wire.frame(wire.Fatal(why)), socket.MSG_DONTWAIT)
        os._exit(1)


class _Forwarding(logging.Handler):
    """What this process logs, the parent does."""

    def __init__(self, send: Callable[[wire.ToParent], None]) -> None:
        super().__init__()
        self._tell = send

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, str | float] = getattr(record, "fields", {})
        self._tell(wire.Log(record.name, record.levelno, record.getMessage(), fields))


class _StepDone:
    """In the mailbox: the launched step can be committed."""


_STEP_DONE: Final = _StepDone()

Mailbox = queue.SimpleQueue[wire.ToChild | _StepDone | Compiled]
"""Bounded by the parent: it limits its open requests, and each has one Submit, one grammar and one Abort at most."""


class EngineLoop:
    """Turns of the engine; the mailbox is handled between and during steps, a report goes out every HEARTBEAT_S."""

    def __init__(self, engine: Engine, parent: Parent, mailbox: Mailbox, grammars: Grammars | None) -> None:
        self._engine = engine
        self._compiling = None if grammars is None else Compiling(grammars, mailbox.put)
        self._parent = parent
        self._mailbox = mailbox
        self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step-waiter")
        self._next_heartbeat_s = 0.0
        self._attended: StepHandle | None = None
        self._is_done = False
        """The attended step."""

    def run(self) -> Never:
        """Never returns; the reader thread ends the process when the parent closes the socket."""
        while True:
            report = self._engine.step(self._attend)
            if report is None:
                self._handle_next()
            else:
                self._send(report)
            while not self._mailbox.empty():
                self._handle_next()

    def _attend(self, handle: StepHandle, until_s: float | None) -> None:
        """Handles messages until the step is done, or until then."""
        if handle is not self._attended:
            self._attended, self._is_done = handle, False
            self._waiter.submit(handle.tokens).add_done_callback(lambda _: self._mailbox.put(_STEP_DONE))
        while not self._is_done and (until_s is None or time.monotonic() < until_s):
            self._handle_next(until_s)

    def _handle_next(self, until_s: float | None = None) -> None:
        """Waits for one message, until then at most; sends the heartbeat that is due."""
        wake_s = self._next_heartbeat_s if until_s is None else min(until_s, self._next_heartbeat_s)
        if self._compiling is not None:
            for request_id, error in self._compiling.overdue().items():
                self._refuse(request_id, error)
        try:
            message = self._mailbox.get(timeout=max(0.0, wake_s - time.monotonic()))
        except queue.Empty:
            if time.monotonic() >= self._next_heartbeat_s:
                self._send(StepReport(load=self._engine.load(), shape=self._engine.running))
            return
        match message:
            case wire.Submit(request) if request.sampling.grammar is None:
                self._submit(request)
            case wire.Submit(request):
                if self._compiling is None:
                    refusal = InvalidRequest(FIELD, "given", "nothing: this worker was started without a vocabulary")
                    self._refuse(request.request_id, refusal)
                else:
                    self._compiling.begin(request)
            case Compiled(request, matcher):
                assert self._compiling is not None
                if not self._compiling.is_wanted(message):
                    pass
                elif isinstance(matcher, InvalidRequest):
                    self._refuse(request.request_id, matcher)
                else:
                    self._submit(request, matcher)
            case wire.Abort(request_id):
                self._engine.abort(request_id)
                if self._compiling is not None:
                    self._compiling.abort(request_id)
                self._next_heartbeat_s = 0.0  # the freed pages are news
            case _StepDone():
                self._is_done = True

    def _submit(self, request: EngineRequest, matcher: Matcher | None = None) -> None:
        try:
            self._engine.submit(request, matcher)
        except InvalidRequest as error:
            self._refuse(request.request_id, error)

    def _refuse(self, request_id: RequestId, error: InvalidRequest) -> None:
        self._parent.send(wire.Refused(request_id, error.field, error.value, error.allowed))

    def _send(self, report: StepReport) -> None:
        self._parent.send(wire.Report(report))
        self._next_heartbeat_s = time.monotonic() + wire.HEARTBEAT_S / 2


def main(argv: list[str]) -> int:
    """Loads, warms up, says Ready, then loops. Exit code 1 when the model cannot be served."""
    # The parent decides when this process ends; a Ctrl-C in the terminal reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(argv[1]))
    start = wire.receive(sock)
    assert isinstance(start, wire.Start)
    mailbox: Mailbox = queue.SimpleQueue()
    grammars: Future[Grammars | None] = Future()
    reading = (sock, mailbox, start.config, grammars)
    threading.Thread(target=_read, args=reading, name="parent-reader", daemon=True).start()
    parent = Parent(sock)
    try:
        with _forwarding(parent.send):
            engine, info = _load(start, parent)
        loop = EngineLoop(engine, parent, mailbox, grammars.result())
    except OstryaError as error:
        parent.send(wire.Fatal(" ".join(str(error).split())))
        return 1
    try:
        parent.send(wire.Ready(info))
        loop.run()
    except ConnectionError:
        return 0  # the parent is gone, and the reader thread is about to see it too


@contextlib.contextmanager
def _forwarding(send: Callable[[wire.ToParent], None]) -> Iterator[None]:
    """While the model is loaded."""
    handler, ours = _Forwarding(send), logging.getLogger("ostrya")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)


def _load(start: wire.Start, parent: Parent) -> tuple[Engine, EngineInfo]:
    config = start.config
    config.check()
    if config.backend != "roofline" and not Path(config.model_path).exists():
        raise ModelLoadError(f"model path {config.model_path} does not exist")
    runner, model = load_replica(
        config,
        start.factory,
        start.slice_,
        end=parent.end,
        waiting=lambda words: parent.send(wire.Waiting(words)),
    )
    if model.num_pages is not None:
        config = msgspec.structs.replace(config, num_pages=model.num_pages)
    if beyond := [token_id for token_id in config.eos_token_ids if not 0 <= token_id < model.vocab_size]:
        raise ModelLoadError(
            f"{config.model_path}: a turn ends with token {beyond[0]}, but the model's ids end at "
            f"{model.vocab_size - 1}; tokenizer and weights are of different models"
        )
    if config.num_pages == AUTO_PAGES:
        raise ModelLoadError(f"num_pages is auto; backend {config.backend} cannot say how many fit: set num_pages")
    engine = Engine(
        runner, config, context_tokens=model.context_tokens, eos_token_ids=config.eos_token_ids, limit=model.limit
    )
    started_s = time.monotonic()
    engine.warm_up()
    info = EngineInfo(
        model=config.model_name,
        backend=config.backend,
        dtype=config.dtype,
        context_tokens=engine.scheduler.context_tokens,
        vocab_size=model.vocab_size,
        page_size=config.page_size,
        num_pages=config.num_pages,
        routing_stride=config.routing_stride,
        eos_token_ids=config.eos_token_ids,
        max_running=config.max_running,
        load_s=model.load_s,
        weights=model.weights,
        warmup_s=time.monotonic() - started_s,
        load_bytes=model.load_bytes,
        memory=model.memory,
        peaks=None if model.limit is None else model.limit.peaks,
        is_simulated=model.is_simulated,
    )
    return engine, info


def _prepare(grammars: "Future[Grammars | None]", tokens: list[bytes], config: EngineConfig) -> None:
    try:
        grammars.set_result(Grammars(tokens, eos_token_ids=config.eos_token_ids) if tokens else None)
    except ValueError as error:
        refusal = ModelLoadError(f"{config.model_path}: its vocabulary cannot be used for grammars: {error}")
        grammars.set_exception(refusal)


def _read(sock: socket.socket, mailbox: Mailbox, config: EngineConfig, grammars: "Future[Grammars | None]") -> None:
    """Makes the grammars while the model is loaded, then posts the parent's messages; ends the process at once,
    whatever it is doing, when the parent is gone."""
    try:
        vocabulary = wire.receive(sock)
        assert isinstance(vocabulary, wire.Vocabulary)
        _prepare(grammars, vocabulary.tokens, config)
        while True:
            mailbox.put(wire.receive(sock))
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
