"""Protobuf at the edge only: requests become engine requests here, checked; engine outputs become messages here.

A router has checked most of this already; a worker does not rely on it.
"""

import secrets
from collections.abc import Callable, Sequence

from ostrya.api.v1 import common_pb2, worker_pb2
from ostrya.engine.types import EngineInfo, EngineRequest, FinishReason, Load, RequestId, Sampling, SequenceOutput
from ostrya.errors import InvalidRequest, UnknownModel
from ostrya.service.bounds import MAX_STOP_TOKEN_IDS, check_drain_s, check_name, check_number

MAX_TEMPERATURE = 100.0
SLICE = 16_384
"""Token ids that are gone through in one go: a millisecond in which no other thread runs."""
DEFAULT_TEMPERATURE = 1.0
DEFAULT_TOP_P = 1.0

_FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


def draw_seed() -> int:
    """A seed for a request that has none."""
    return secrets.randbits(64)


def engine_request(
    request: worker_pb2.WorkerServiceGenerateRequest,
    *,
    request_id: RequestId,
    info: EngineInfo,
    draw_seed: Callable[[], int] = draw_seed,
) -> EngineRequest:
    """The checked request with every default filled in. InvalidRequest or UnknownModel, naming what is wrong."""
    check_name("request_id", request.request_id)
    check_name("cache_namespace", request.cache_namespace)
    check_number("sampling.stop_token_ids", request.sampling.stop_token_ids, MAX_STOP_TOKEN_IDS, "ids")
    if request.model not in ("", info.model):
        check_name("model", request.model)
        raise UnknownModel(request.model, (info.model,))
    num_prompt = len(request.token_ids)
    if num_prompt == 0:
        raise InvalidRequest("token_ids", "empty", "at least 1 token")
    if num_prompt >= info.context_tokens:
        allowed = (
            f"at most {info.context_tokens - 1}, one below the context of {info.context_tokens}; shorten the prompt"
        )
        raise InvalidRequest("token_ids", f"{num_prompt} tokens long", allowed)
    return EngineRequest(
        request_id=request_id,
        token_ids=_token_ids(request.token_ids, "token_ids", info),
        sampling=_sampling(request.sampling, num_prompt=num_prompt, info=info, draw_seed=draw_seed),
        cache_namespace=request.cache_namespace,
    )


def _sampling(
    params: common_pb2.SamplingParams, *, num_prompt: int, info: EngineInfo, draw_seed: Callable[[], int]
) -> Sampling:
    temperature = params.temperature if params.HasField("temperature") else DEFAULT_TEMPERATURE
    if not 0 <= temperature <= MAX_TEMPERATURE:  # false for NaN too
        raise InvalidRequest("sampling.temperature", _number(temperature), f"[0, {MAX_TEMPERATURE:g}]")
    if params.top_k < 0:
        raise InvalidRequest("sampling.top_k", params.top_k, "0 (all) or more")
    top_p = params.top_p if params.HasField("top_p") else DEFAULT_TOP_P
    if not 0 < top_p <= 1:
        raise InvalidRequest("sampling.top_p", _number(top_p), "(0, 1]")
    room = info.context_tokens - num_prompt
    max_tokens = params.max_tokens if params.HasField("max_tokens") else room
    if max_tokens < 1:
        raise InvalidRequest("sampling.max_tokens", max_tokens, "1 or more, or absent for what the context has left")
    if max_tokens > room:
        allowed = f"at most {room} with this prompt, as the context has {info.context_tokens} tokens"
        raise InvalidRequest("sampling.max_tokens", f"{max_tokens} with a prompt of {num_prompt} tokens", allowed)
    return Sampling(
        temperature=temperature,
        top_k=params.top_k,
        top_p=top_p,
        seed=params.seed if params.HasField("seed") else draw_seed(),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(_token_ids(params.stop_token_ids, "sampling.stop_token_ids", info)),
        ignore_eos=params.ignore_eos,
    )


def _token_ids(token_ids: Sequence[int], field: str, info: EngineInfo) -> list[int]:
    checked: list[int] = []
    for first in range(0, len(token_ids), SLICE):
        piece = list(token_ids[first : first + SLICE])
        if max(piece) >= info.vocab_size:
            index, value = next((i, value) for i, value in enumerate(piece, start=first) if value >= info.vocab_size)
            raise InvalidRequest(f"{field}[{index}]", value, f"0 to {info.vocab_size - 1}, the model's vocabulary")
        checked += piece
    return checked


def _number(value: float) -> str:
    """Nine digits tell every float32 from its neighbours, and so from the limit."""
    return f"{value:.9g}"


def drain_timeout_s(request: worker_pb2.DrainRequest, *, default: float) -> float:
    """How long a drain may take. InvalidRequest when that is negative, no number, or more than a day."""
    if not request.HasField("timeout_s"):
        return default
    check_drain_s(request.timeout_s)
    return request.timeout_s


def response(
    output: SequenceOutput, *, usage: common_pb2.Usage | None, load: Load
) -> worker_pb2.WorkerServiceGenerateResponse:
    """One message of an answer."""
    return worker_pb2.WorkerServiceGenerateResponse(
        token_ids=output.token_ids,
        finish_reason=_FINISH_REASONS[output.finish_reason],
        usage=usage,
        load=load_report(load),
    )


def load_report(load: Load) -> common_pb2.LoadReport:
    return common_pb2.LoadReport(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        queued_tokens=load.queued_tokens,
        free_pages=load.free_pages,
        reusable_pages=load.reusable_pages,
        total_pages=load.total_pages,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        queried_tokens_total=load.queried_tokens,
        hit_tokens_total=load.hit_tokens,
    )
