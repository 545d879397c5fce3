"""Sampling parameters through the whole engine, on a tiny random model: none is ignored, none changes another row, and
an answer that goes on in another engine goes on exactly."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from re import fullmatch

import msgspec
import pytest

from ostrya.engine.backends.base import Runner
from ostrya.engine.backends.cpu import load_runner
from ostrya.engine.config import EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.grammar import Grammars
from ostrya.engine.types import EngineRequest, FinishReason, Grammar, RequestId, Sampling, TokenScore
from tests.unit.engine.models.checkpoints import Tiny, write_gguf

TINY = Tiny(num_layers=1)
PROMPT = [5, 6, 7, 9, 5, 6, 7, 9, 11, 30, 31, 32, 33]
NUM_NEW = 24
EOS = 2


@dataclass
class Stack:
    """One loaded model; each call puts a fresh engine on it."""

    runner: Runner
    config: EngineConfig

    def answers(
        self, *requests: EngineRequest, chunk: int = 64, num_pages: int = 128, eos: int = EOS
    ) -> dict[str, "Answer"]:
        """Of requests that are submitted together."""
        config = msgspec.structs.replace(self.config, max_prefill_chunk_tokens=chunk, num_pages=num_pages)
        engine = Engine(self.runner, config, context_tokens=TINY.context_tokens, eos_token_ids=(eos,))
        return run(engine, *requests)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    reason: FinishReason | None = None
    num_cached: int = 0


VOCABULARY = [b"", b"", b"", *(bytes([byte]) for byte in range(33, 126))]
GRAMMARS = Grammars(VOCABULARY, eos_token_ids=(EOS,))


def run(engine: Engine, *requests: EngineRequest) -> dict[str, Answer]:
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        grammar, first = request.sampling.grammar, len(request.token_ids) - request.num_output_tokens
        matcher = None if grammar is None else GRAMMARS.compile(grammar, output=request.token_ids[first:])
        engine.submit(request, matcher)
    while report := engine.step():
        for output in report.outputs:
            answer = answers[output.request_id]
            answer.tokens += output.token_ids
            answer.scores += output.scores
            answer.prompt_scores += output.prompt_scores
            answer.reason = output.finish_reason
            answer.num_cached = output.num_cached_tokens
    engine.scheduler.pool.check()
    return {str(request_id): answer for request_id, answer in answers.items()}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", TINY, TINY.weights())
    config = EngineConfig(
        model_path=str(path),
        model_name="tiny",
        tokenizer_fingerprint="",
        dtype="float32",
        page_size=4,
        num_pages=128,
        max_running=8,
        max_step_tokens=64,
        num_threads=1,
    )
    runner, _ = load_runner(config)
    yield Stack(runner, config)
    runner.close()


PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=3, max_tokens=NUM_NEW, ignore_eos=True)


def sampled(**changes: object) -> Sampling:
    return msgspec.structs.replace(PLAIN, **changes)


def request(
    sampling: Sampling, *, name: str = "r", token_ids: Sequence[int] = PROMPT, output: int = 0
) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name), token_ids=list(token_ids), sampling=sampling, num_output_tokens=output
    )


def answer(stack: Stack, sampling: Sampling, *, eos: int = EOS) -> Answer:
    return stack.answers(request(sampling), eos=eos)["r"]


EVERY: dict[str, Sampling] = {
    "plain": PLAIN,
    "min_p": sampled(min_p=0.7),
    "typical_p": sampled(typical_p=0.1),
    "repetition": sampled(repetition_penalty=3.0),
    "repetition of the prompt": sampled(repetition_penalty=50.0, max_tokens=1, seed=5),
    "presence": sampled(presence_penalty=2.0, temperature=0.3),
    "frequency": sampled(frequency_penalty=-2.0),
    "bias": sampled(logit_bias={40: 6.0, 41: 5.0}),
    "greedy with penalties": sampled(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5),
    "top_k and min_p": sampled(top_k=20, top_p=0.9, min_p=0.3, typical_p=0.8),
}


FORMS: dict[str, tuple[Grammar, str]] = {
    "regex": (Grammar(kind="regex", text="[a-d]{3}(xy|zz)+[0-9]{4}"), "[a-d]{3}(xy|zz)+[0-9]{4}"),
    "choice": (Grammar(kind="choice", text='["maybe","yes","no","yes,but"]'), "maybe|yes|no|yes,but"),
    "schema": (
        Grammar(
            kind="json_schema",
            text='{"type":"object","properties":{"n":{"type":"integer"},"b":{"enum":["x","y"]}},"required":["n","b"],'
            '"additionalProperties":false,"x-guidance":{"whitespace_flexible":false}}',
        ),
        r'\{"n":-?[0-9]+,"b":"[xy]"\}',
    ),
    "lark": (Grammar(kind="lark", text='start: "(" start ")" | /[pq]/'), r"\(*[pq]\)*"),
}


def text_of(answer: Answer) -> str:
    return b"".join(VOCABULARY[token] for token in answer.tokens).decode()


def bare(sampling: Sampling) -> Sampling:
    """The same without what this file is about."""
    return sampled(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
    )


@pytest.mark.parametrize("name", [name for name in EVERY if name != "plain"])
def test_no_parameter_is_ignored(stack: Stack, name: str) -> None:
    assert answer(stack, EVERY[name]).tokens != answer(stack, bare(EVERY[name])).tokens


@pytest.mark.parametrize("changed", [{"temperature": 0.4}, {"top_k": 3}, {"top_p": 0.2}, {"seed": 4}], ids=str)
def test_nor_is_one_of_those_that_were_there_before(stack: Stack, changed: dict[str, float]) -> None:
    assert answer(stack, sampled(**changed)).tokens != answer(stack, PLAIN).tokens


@pytest.mark.parametrize("changed", [{"temperature": 0}, {"temperature": 1e-4}, {"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_what_leaves_one_token_gives_the_likeliest(stack: Stack, changed: dict[str, float]) -> None:
    scored = answer(stack, sampled(**changed, num_top=1))
    assert [score.logprob for score in scored.scores] == [score.top_logprobs[0] for score in scored.scores]


@pytest.mark.parametrize(("chunk", "num_pages"), [(64, 128), (3, 128), (64, 24)])
def test_alone_together_in_chunks_and_preempted_the_tokens_and_scores_are_the_same(
    stack: Stack, chunk: int, num_pages: int
) -> None:
    wanted = {name: msgspec.structs.replace(sampling, num_top=2, num_prompt_top=1) for name, sampling in EVERY.items()}
    together = stack.answers(
        *(request(sampling, name=name) for name, sampling in wanted.items()), chunk=chunk, num_pages=num_pages
    )
    for name, sampling in wanted.items():
        alone = stack.answers(request(sampling))["r"]
        assert together[name].tokens == alone.tokens
        assert_close(together[name].scores, alone.scores)
        assert_close(together[name].prompt_scores, alone.prompt_scores)


def assert_close(some: Sequence[TokenScore], others: Sequence[TokenScore]) -> None:
    """Up to the summation order of float32: another chunk takes another path through the attention."""
    assert [one.top_ids for one in some] == [one.top_ids for one in others]
    assert [one.logprob for one in some] == pytest.approx([one.logprob for one in others], abs=1e-4)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("num_before", [1, 7])
def test_an_answer_goes_on_exactly_in_another_engine(stack: Stack, name: str, num_before: int) -> None:
    sampling = msgspec.structs.replace(
        EVERY[name], max_tokens=NUM_NEW, num_top=3, min_tokens=20, ignore_eos=False, bad_words=((40,), (41, 12))
    )
    whole = stack.answers(request(sampling))["r"]
    rest = msgspec.structs.replace(sampling, max_tokens=NUM_NEW - num_before, min_tokens=20 - num_before)
    going_on = request(rest, token_ids=[*PROMPT, *whole.tokens[:num_before]], output=num_before)
    continued = stack.answers(going_on)["r"]
    assert continued.tokens == whole.tokens[num_before:]
    assert_close(continued.scores, whole.scores[num_before:])
    assert continued.reason == whole.reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", FORMS)
def test_an_answer_has_the_form_asked_for_and_ends_with_it(stack: Stack, name: str, temperature: float) -> None:
    grammar, form = FORMS[name]
    bias = {VOCABULARY.index(b")"): 4.0, VOCABULARY.index(b"p"): 2.0}  # or the random model opens brackets for ever
    for seed in range(4):
        sampling = sampled(
            grammar=grammar,
            temperature=temperature,
            seed=seed,
            max_tokens=90,
            logit_bias=bias,
            ignore_eos=seed % 2 == 0,
        )
        written = answer(stack, sampling)
        assert written.reason is FinishReason.STOP
        assert fullmatch(form, text_of(written)), text_of(written)
    assert not fullmatch(form, text_of(answer(stack, sampled(temperature=temperature))))


def test_forms_are_the_same_alone_together_preempted_and_in_another_engine(stack: Stack) -> None:
    wanted = {name: sampled(grammar=grammar, max_tokens=40, num_top=1) for name, (grammar, _) in FORMS.items()} | EVERY
    together = stack.answers(*(request(sampling, name=name) for name, sampling in wanted.items()), num_pages=24)
    for name, sampling in wanted.items():
        assert together[name].tokens == answer(stack, sampling).tokens
    whole = together["schema"]
    rest = msgspec.structs.replace(wanted["schema"], max_tokens=40 - 5)
    continued = stack.answers(request(rest, token_ids=[*PROMPT, *whole.tokens[:5]], output=5))["r"]
    assert (continued.tokens, continued.reason) == (whole.tokens[5:], whole.reason)


def test_what_a_form_and_a_bad_word_leave_nothing_of_is_cut_short(stack: Stack) -> None:
    bad = (VOCABULARY.index(b"b"),)
    written = answer(stack, sampled(grammar=Grammar(kind="regex", text="ab"), bad_words=(bad,), ignore_eos=False))
    assert written.reason is FinishReason.LENGTH
    assert text_of(written)[0] == "a"


def test_a_continuation_that_calls_its_output_prompt_would_differ(stack: Stack) -> None:
    """What the engine is told of the output matters: penalties on it alone would otherwise begin anew."""
    sampling = EVERY["presence"]
    whole = answer(stack, sampling)
    rest = msgspec.structs.replace(sampling, max_tokens=NUM_NEW - 12)
    forgotten = stack.answers(request(rest, token_ids=[*PROMPT, *whole.tokens[:12]]))["r"]
    assert forgotten.tokens != whole.tokens[12:]


def test_nothing_ends_an_answer_before_min_tokens(stack: Stack) -> None:
    # With this bias nothing but an ending would be chosen.
    endings = {2: 90.0, 50: 80.0}
    sampling = sampled(logit_bias=endings, stop_token_ids=frozenset({50}), ignore_eos=False)
    assert answer(stack, sampling).tokens == [2]
    longer = answer(stack, msgspec.structs.replace(sampling, min_tokens=6))
    assert len(longer.tokens) == 7
    assert not {2, 50} & set(longer.tokens[:6])
    assert (longer.tokens[6], longer.reason) == (2, FinishReason.STOP)


def test_a_bad_word_of_one_token_or_several_never_comes(stack: Stack) -> None:
    sampling = sampled(temperature=0.0, logit_bias={40: 60.0, 41: 55.0, 42: 50.0})
    assert answer(stack, sampling).tokens == [40] * NUM_NEW
    tokens = answer(stack, msgspec.structs.replace(sampling, bad_words=((40, 40), (40, 41, 40)))).tokens
    assert tokens[:2] == [40, 41]
    pairs, triples = set(pairwise(tokens)), set(zip(tokens, tokens[1:], tokens[2:], strict=False))
    assert (40, 40) not in pairs
    assert (40, 41, 40) not in triples
    assert 40 not in answer(stack, msgspec.structs.replace(sampling, bad_words=((40,),))).tokens


def test_a_bad_word_that_begins_in_the_prompt_is_none(stack: Stack) -> None:
    sampling = sampled(temperature=0.0, logit_bias={40: 60.0}, bad_words=((PROMPT[-1], 40),), max_tokens=1)
    assert answer(stack, sampling).tokens == [40]


def test_scores_are_the_models_own_log_probabilities(stack: Stack) -> None:
    """The same numbers from prompt and output, whatever the processors did; and they are a distribution."""
    sampling = sampled(num_top=TINY.vocab_size, repetition_penalty=3.0, logit_bias={40: 9.0}, max_tokens=8)
    written = answer(stack, sampling)
    again = sampled(num_prompt_top=TINY.vocab_size, max_tokens=1)
    read = stack.answers(request(again, token_ids=[*PROMPT, *written.tokens]))["r"]
    assert len(read.prompt_scores) == len(PROMPT) + 8 - 1
    assert read.scores == []
    assert_close(read.prompt_scores[-8:], written.scores)
    for token, score in zip(written.tokens, written.scores, strict=True):
        assert sum(map(math.exp, score.top_logprobs)) == pytest.approx(1)
        assert list(score.top_logprobs) == sorted(score.top_logprobs, reverse=True)
        assert score.top_logprobs[score.top_ids.index(token)] == score.logprob


def test_scored_prompts_take_nothing_from_the_cache_and_others_still_do(stack: Stack) -> None:
    config = stack.config
    engine = Engine(stack.runner, config, context_tokens=TINY.context_tokens, eos_token_ids=())
    cold = run(engine, request(sampled(num_prompt_top=0, max_tokens=1)))["r"]
    assert (cold.num_cached, len(cold.prompt_scores)) == (0, len(PROMPT) - 1)
    assert run(engine, request(sampled(max_tokens=1)))["r"].num_cached == 12
    again = run(engine, request(sampled(num_prompt_top=0, max_tokens=1)))["r"]
    assert again.num_cached == 0
    assert_close(again.prompt_scores, cold.prompt_scores)
    assert all(score.top_ids == () for score in again.prompt_scores)
