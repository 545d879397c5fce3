"""Engines on the fake runner, small enough that pages run out."""

from collections.abc import Callable, Iterable
from functools import cache

from msgspec.structs import replace

from ostrya.engine.config import EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.grammar import Grammars, Matcher
from ostrya.engine.types import EngineRequest, FinishReason, Grammar, RequestId, Sampling, TokenScore
from tests.fakes.runner import EOS, VOCAB_SIZE, FakeRunner


@cache
def grammars() -> Grammars:
    """Over the fake model's vocabulary: a printable character of ASCII is a token."""
    spelled = [chr(token_id).encode() if 32 <= token_id < 127 else b"" for token_id in range(VOCAB_SIZE)]
    return Grammars(spelled, eos_token_ids=(EOS,))


class Bench:
    """An engine with a fake runner, and what came out of it by request."""

    def __init__(
        self,
        *,
        context_tokens: int = 256,
        clock: Callable[[], float] = lambda: 0.0,
        num_pages: int = 65,
        max_running: int = 8,
        max_step_tokens: int = 64,
        max_prefill_chunk_tokens: int = 64,
        routing_stride: int = 1,
        max_context_tokens: int | None = None,
        overlap: bool = True,
        max_inter_token_s: float = 0.0,
    ) -> None:
        self.config = EngineConfig(
            model_path="/",
            model_name="fake",
            tokenizer_fingerprint="t",
            page_size=4,
            num_pages=num_pages,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_prefill_chunk_tokens=max_prefill_chunk_tokens,
            routing_stride=routing_stride,
            max_context_tokens=max_context_tokens,
            overlap=overlap,
            max_inter_token_s=max_inter_token_s,
        )
        self.runner = FakeRunner(num_pages=self.config.num_pages, page_size=self.config.page_size)
        self.engine = Engine(self.runner, self.config, context_tokens=context_tokens, eos_token_ids=(EOS,), clock=clock)
        self.engine.warm_up()
        self.scheduler = self.engine.scheduler
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.scores: dict[str, list[TokenScore]] = {}
        """Of the prompt, then of the output, as far as asked for."""
        self.reasons: dict[str, FinishReason | None] = {}
        self.resume_points: set[int] = set()

    def abort(self, request_id: str) -> None:
        self.engine.abort(RequestId(request_id))

    def submit(
        self,
        request_id: str,
        token_ids: Iterable[int],
        *,
        max_tokens: int = 8,
        seed: int = 0,
        temperature: float = 0.0,
        stop_token_ids: frozenset[int] = frozenset(),
        ignore_eos: bool = True,
        cache_namespace: str = "",
        priority: int = 0,
        grammar: Grammar | None = None,
        **wants: object,
    ) -> None:
        """`wants`: more fields of Sampling."""
        plain = Sampling(
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            seed=seed,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            grammar=grammar,
        )
        matcher: Matcher | None = None if grammar is None else grammars().compile(grammar)
        self.engine.submit(
            EngineRequest(
                request_id=RequestId(request_id),
                token_ids=list(token_ids),
                sampling=replace(plain, **wants),
                cache_namespace=cache_namespace,
                priority=priority,
            ),
            matcher,
        )

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """One step, invariants checked; calls `meanwhile` while it runs. False when there was nothing to do."""
        report = self.engine.step(lambda *_: meanwhile())
        self.scheduler.pool.check()
        if report is None:
            return False
        last = self.runner.plans[-1]
        assert last.num_tokens <= self.config.max_step_tokens
        assert last.num_rows <= self.config.max_running
        for output in report.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.cached.setdefault(output.request_id, output.num_cached_tokens)
            self.scores.setdefault(output.request_id, []).extend((*output.prompt_scores, *output.scores))
            self.reasons[output.request_id] = output.finish_reason
        assert not set(report.stored) & set(report.removed)
        self.resume_points -= set(report.removed)
        self.resume_points |= set(report.stored)
        assert self.resume_points == self.scheduler.prefix.resume_points()
        return True

    def run(self) -> None:
        """Steps until idle; afterwards no page is referenced."""
        while self.step():
            pass
        load = self.engine.load()
        assert (load.num_running, load.num_waiting, load.queued_tokens) == (0, 0, 0)
        assert load.free_pages + load.reusable_pages == load.total_pages

    def generate(
        self,
        token_ids: Iterable[int],
        *,
        max_tokens: int = 8,
        seed: int = 0,
        temperature: float = 0.0,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> list[int]:
        """The tokens of one request that has the engine to itself."""
        request_id = f"alone-{len(self.tokens)}"
        self.submit(
            request_id,
            token_ids,
            max_tokens=max_tokens,
            seed=seed,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
        )
        self.run()
        return self.tokens[request_id]
