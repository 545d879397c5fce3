"""The blocking client. Safe to share between threads; each Stream belongs to one reader (any thread may close it)."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from ostrya.api.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from ostrya.client.answer import Answer, Chunk, joined
from ostrya.client.attempts import CHANNEL_OPTIONS, Attempts, OnRetry, Peer
from ostrya.client.request import GenerateOptions, Message, chat_messages, generate_request, made

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)


class _Unary(Protocol[Request, Response]):
    def __call__(self, request: Request, *, timeout: float | None = None) -> Response: ...


class _Call(Protocol):
    def __next__(self) -> inference_pb2.GenerateResponse: ...
    def cancel(self) -> bool: ...


class Client:
    """A connection to one router. Connects on first use; `timeout_s` is the whole time of a call, with retries.

    `on_retry` hears of each failed try before the wait for the next.
    """

    def __init__(self, target: str = "127.0.0.1:50051", *, on_retry: OnRetry | None = None) -> None:
        self.target, self._on_retry = target, on_retry
        self._peer = Peer(target)
        self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def generate(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        **options: Unpack[GenerateOptions],
    ) -> "Stream":
        """Starts one answer from exactly one kind of prompt. Iterate the stream for it; errors come from there.

        `metadata` goes along with the call: W3C `traceparent` and `tracestate` make the answer a part of your trace.
        InvalidRequest comes at once where a value cannot even be sent.
        """
        request = generate_request(text, messages, token_ids, options)
        method = self._inference.Generate

        def open_call(remaining_s: float | None) -> _Call:
            return method(request, timeout=remaining_s, metadata=tuple(metadata))

        return Stream(open_call, Attempts(timeout_s, peer=self._peer, on_retry=self._on_retry), self._peer)

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        continue_final_message: bool = False,
        model: str = "",
        timeout_s: float = 10.0,
    ) -> list[int]:
        """The token ids that `generate` would make of the same prompt."""
        request = made(
            inference_pb2.TokenizeRequest,
            model=model,
            text=text,
            messages=chat_messages(messages),
            continue_final_message=continue_final_message,
        )
        return list(self._unary(self._inference.Tokenize, request, timeout_s).token_ids)

    def models(self, *, timeout_s: float = 10.0) -> list[inference_pb2.Model]:
        """What is served."""
        return list(self._unary(self._inference.ListModels, inference_pb2.ListModelsRequest(), timeout_s).models)

    def replicas(self, *, timeout_s: float = 10.0) -> admin_pb2.ListReplicasResponse:
        """Every replica the router knows, its load, and how much the router knows."""
        return self._unary(self._admin.ListReplicas, admin_pb2.ListReplicasRequest(), timeout_s)

    def explain(self, decision_id: str, *, timeout_s: float = 10.0) -> admin_pb2.ExplainRouteResponse:
        """Why a request went where it went; NotFound after ten minutes."""
        request = made(admin_pb2.ExplainRouteRequest, decision_id=decision_id)
        return self._unary(self._admin.ExplainRoute, request, timeout_s)

    def status(self, *, timeout_s: float = 10.0) -> admin_pb2.GetStatusResponse:
        """What the router is, sees and is busy with."""
        return self._unary(self._admin.GetStatus, admin_pb2.GetStatusRequest(), timeout_s)

    def cordon(self, worker_id: str, *, timeout_s: float = 10.0) -> None:
        """The replica takes no new work, from any router, and keeps what it has; NotFound if it is not known."""
        request = made(admin_pb2.CordonReplicaRequest, worker_id=worker_id)
        self._unary(self._admin.CordonReplica, request, timeout_s)

    def uncordon(self, worker_id: str, *, timeout_s: float = 10.0) -> None:
        """The replica takes new work again, also after a drain."""
        request = made(admin_pb2.UncordonReplicaRequest, worker_id=worker_id)
        self._unary(self._admin.UncordonReplica, request, timeout_s)

    def drain(self, worker_id: str, *, drain_timeout_s: float | None = None, timeout_s: float | None = None) -> int:
        """Cordons the replica and waits until it is empty; after `drain_timeout_s` (None: its own) the rest must go on
        elsewhere. Returns how many requests that were."""
        request = made(admin_pb2.DrainReplicaRequest, worker_id=worker_id, timeout_s=drain_timeout_s)
        return self._unary(self._admin.DrainReplica, request, timeout_s).num_cancelled

    def close(self) -> None:
        """Cancels what runs and disconnects."""
        self._peer.is_closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, method: _Unary[Request, Response], request: Request, timeout_s: float | None) -> Response:
        attempts = Attempts(timeout_s, peer=self._peer, on_retry=self._on_retry)
        while True:
            try:
                response = method(request, timeout=attempts.remaining_s())
                self._peer.has_answered = True
                return response
            except grpc.RpcError as rpc:
                delay_s = attempts.delay_after(self._peer.failure(rpc))
            time.sleep(delay_s)


class Stream(Answer, Iterator[Chunk]):
    """One answer, chunk by chunk. Closing it before its end cancels the request."""

    def __init__(self, open_call: Callable[[float | None], _Call], attempts: Attempts, peer: Peer) -> None:
        super().__init__()
        self._open_call, self._attempts, self._peer = open_call, attempts, peer
        self._closed = threading.Event()
        self._call = open_call(attempts.remaining_s())

    def __next__(self) -> Chunk:
        while not self._closed.is_set():
            try:
                response = next(self._call)
                self._peer.has_answered = True
                return self.absorb(response)
            except grpc.RpcError as rpc:
                if self._closed.is_set():
                    break
                self._wait_for_next_try(rpc)
            except BaseException:
                # Ctrl-C: an exception that whoever reads does not expect, so it may keep the stream and forget it.
                self.close()
                raise
            if not self._closed.is_set():
                self._open_again()
        raise StopIteration

    def read(self) -> str:
        """The text from here to the end; of choice 0, if there are several."""
        return self.read_all()[0]

    def read_all(self) -> list[str]:
        """The text of each choice from here to the end."""
        return joined(self)

    def close(self) -> None:
        """Cancels the request unless it has ended. The stream then ends without an error."""
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_again(self) -> None:
        self._call = self._open_call(self._attempts.remaining_s())
        if self._closed.is_set():
            # Whoever closed meanwhile has met the call before.
            self._call.cancel()

    def _wait_for_next_try(self, rpc: grpc.RpcError) -> None:
        error = self._peer.failure(rpc)
        if self.started:
            raise error from rpc
        self._closed.wait(self._attempts.delay_after(error))
