"""Protobuf at the edge only: requests become engine requests here, checked; engine outputs become messages here.

A router has checked most of this already; a worker does not rely on it.
"""

import json
import secrets
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from ostrya.api.v1 import common_pb2, worker_pb2
from ostrya.engine.types import (
    EngineInfo,
    EngineRequest,
    FinishReason,
    Grammar,
    Load,
    RequestId,
    Sampling,
    SequenceOutput,
    TokenScore,
)
from ostrya.errors import InvalidRequest, UnknownModel
from ostrya.service.bounds import (
    MAX_BAD_SEQUENCE_TOKENS,
    MAX_BAD_SEQUENCES,
    check_drain_s,
    check_name,
    check_number,
    check_priority,
)
from ostrya.service.sampling import check_numbers, check_prompt_logprobs, check_ranges

SLICE = 16_384
"""Token ids that are gone through in one go: a millisecond in which no other thread runs."""

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
    check_number("bad_words", request.bad_words, MAX_BAD_SEQUENCES, "sequences")
    check_numbers(request.sampling)
    check_priority(request.priority)
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
    num_output = request.num_output_tokens
    if num_output >= num_prompt:
        raise InvalidRequest("num_output_tokens", num_output, f"below the number of token_ids ({num_prompt})")
    check_ranges(request.sampling, vocab_size=info.vocab_size)
    sampling = _sampling(request.sampling, num_prompt=num_prompt, info=info, draw_seed=draw_seed)
    check_prompt_logprobs(num_prompt - num_output, sampling.num_prompt_top)
    return EngineRequest(
        request_id=request_id,
        token_ids=_token_ids(request.token_ids, "token_ids", info),
        sampling=replace(sampling, bad_words=_bad_words(request.bad_words, info)),
        cache_namespace=request.cache_namespace,
        num_output_tokens=num_output,
        priority=request.priority,
    )


def _sampling(
    params: common_pb2.SamplingParams, *, num_prompt: int, info: EngineInfo, draw_seed: Callable[[], int]
) -> Sampling:
    room = info.context_tokens - num_prompt
    max_tokens = params.max_tokens if params.HasField("max_tokens") else room
    if max_tokens > room:
        allowed = f"at most {room} with this prompt, as the context has {info.context_tokens} tokens"
        raise InvalidRequest("sampling.max_tokens", f"{max_tokens} with a prompt of {num_prompt} tokens", allowed)
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            "sampling.min_tokens", params.min_tokens, f"at most {max_tokens}, what the context has left"
        )
    return Sampling(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        seed=params.seed if params.HasField("seed") else draw_seed(),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(_token_ids(params.stop_token_ids, "sampling.stop_token_ids", info)),
        ignore_eos=params.ignore_eos,
        min_p=params.min_p,
        typical_p=params.typical_p if params.HasField("typical_p") else 1.0,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        min_tokens=params.min_tokens,
        num_top=params.logprobs if params.HasField("logprobs") else None,
        grammar=_grammar(params.structured) if params.HasField("structured") else None,
        num_prompt_top=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )


def _grammar(structured: common_pb2.StructuredOutput) -> Grammar:
    if structured.HasField("json_schema"):
        return Grammar(kind="json_schema", text=structured.json_schema)
    if structured.HasField("regex"):
        return Grammar(kind="regex", text=structured.regex)
    if structured.HasField("lark"):
        return Grammar(kind="lark", text=structured.lark)
    return Grammar(kind="choice", text=json.dumps(list(structured.choice)))


def _bad_words(words: Sequence[worker_pb2.TokenSequence], info: EngineInfo) -> tuple[tuple[int, ...], ...]:
    for index, word in enumerate(words):
        if not 1 <= len(word.token_ids) <= MAX_BAD_SEQUENCE_TOKENS:
            allowed = f"1 to {MAX_BAD_SEQUENCE_TOKENS} tokens"
            raise InvalidRequest(f"bad_words[{index}].token_ids", f"{len(word.token_ids)} tokens long", allowed)
    return tuple(
        tuple(_token_ids(word.token_ids, f"bad_words[{index}].token_ids", info)) for index, word in enumerate(words)
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
        logprobs=map(_logprobs, output.scores),
        prompt_logprobs=map(_logprobs, output.prompt_scores),
    )


def _logprobs(score: TokenScore) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(logprob=score.logprob, top_token_ids=score.top_ids, top_logprobs=score.top_logprobs)


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
        step_base_s=load.step_time.base_s,
        step_row_s=load.step_time.row_s,
        step_prefill_token_s=load.step_time.prefill_token_s,
        step_kv_token_s=load.step_time.kv_token_s,
    )
