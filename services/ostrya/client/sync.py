"""The blocking client. Safe to share between threads; each Stream belongs to one reader (any thread may close it)."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from ostrya.api.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from ostrya.client.answer import Answer, Chunk
from ostrya.client.attempts import CHANNEL_OPTIONS, Attempts, OnRetry, failure
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
        **options: Unpack[GenerateOptions],
    ) -> "Stream":
        """Starts one answer from exactly one kind of prompt. Iterate the stream for it; errors come from there.

        InvalidRequest comes at once where a value cannot even be sent.
        """
        request = generate_request(text, messages, token_ids, options)
        method = self._inference.Generate

        def open_call(remaining_s: float | None) -> _Call:
            return method(request, timeout=remaining_s)

        return Stream(open_call, Attempts(timeout_s, on_retry=self._on_retry), self.target)

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        timeout_s: float = 10.0,
    ) -> list[int]:
        """The token ids that `generate` would make of the same prompt."""
        request = made(inference_pb2.TokenizeRequest, model=model, text=text, messages=chat_messages(messages))
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

    def close(self) -> None:
        """Cancels what runs and disconnects."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, method: _Unary[Request, Response], request: Request, timeout_s: float) -> Response:
        attempts = Attempts(timeout_s, on_retry=self._on_retry)
        while True:
            try:
                return method(request, timeout=attempts.remaining_s())
            except grpc.RpcError as rpc:
                delay_s = attempts.delay_after(failure(rpc, self.target))
            time.sleep(delay_s)


class Stream(Answer, Iterator[Chunk]):
    """One answer, chunk by chunk. Closing it before its end cancels the request."""

    def __init__(self, open_call: Callable[[float | None], _Call], attempts: Attempts, target: str) -> None:
        super().__init__()
        self._open_call, self._attempts, self._target = open_call, attempts, target
        self._closed = threading.Event()
        self._call = open_call(attempts.remaining_s())

    def __next__(self) -> Chunk:
        while not self._closed.is_set():
            try:
                return self.absorb(next(self._call))
            except grpc.RpcError as rpc:
                if self._closed.is_set():
                    break
                self._wait_for_next_try(rpc)
            self._call = self._open_call(self._attempts.remaining_s())
        raise StopIteration

    def read(self) -> str:
        """The text from here to the end."""
        return "".join(chunk.text for chunk in self)

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

    def _wait_for_next_try(self, rpc: grpc.RpcError) -> None:
        error = failure(rpc, self._target)
        if self.started:
            raise error from rpc
        time.sleep(self._attempts.delay_after(error))
