"""Published runs of serving engines: paged caches, continuous batching."""

from collections.abc import Mapping
from dataclasses import dataclass

from ostrya.capacity.memory import CHUNK_TOKENS
from ostrya.capacity.points import Engine, Measure, Point, Use

_COOKBOOK = "sgl-project/sglang-jax cookbook"
_ITL, _TPOT, _TTFT = Measure.WAVE_ITL_MS, Measure.WAVE_TPOT_MS, Measure.WAVE_TTFT_MS
_TOKENS, _LINE_TTFT = Measure.WAVE_TOKENS_PER_S, Measure.LINE_TTFT_MS
_LOAD_TPOT, _LOAD_TOKENS = Measure.TPOT_MS, Measure.SERVED_TOKENS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One benchmark run, and what it measured."""

    name: str
    model: str
    slice_name: str
    source: str
    num_requests: int
    prompt_tokens: int = 1024
    output_tokens: int = 1024
    chunk_tokens: int = CHUNK_TOKENS
    figures: Mapping[Measure, float]
    fitted: frozenset[Measure] = frozenset()
    reason: str = ""
    """Why its throughput misses."""

    def points(self) -> tuple[Point, ...]:
        lengths = "/".join(
            f"{one // 1024}k" if one % 1024 == 0 else str(one) for one in (self.prompt_tokens, self.output_tokens)
        )
        return tuple(
            Point(
                name=f"{self.name}, {lengths}, {self.num_requests} at once",
                engine=Engine.SERVING,
                model=self.model,
                slice_name=self.slice_name,
                measure=measure,
                value=value,
                source=self.source,
                use=Use.FITTED if measure in self.fitted else Use.HELD_OUT,
                # What a run serves follows from its other times.
                repeats_fitted=measure in (_TOKENS, _LOAD_TOKENS) and bool(self.fitted),
                reason=self.reason if measure is _LOAD_TOKENS else "",
                num_requests=self.num_requests,
                prompt_tokens=self.prompt_tokens,
                output_tokens=self.output_tokens,
                chunk_tokens=self.chunk_tokens,
            )
            for measure, value in self.figures.items()
        )


_QWEN_397B = (
    # Prompt, requests at once, median TPOT in ms, output tok/s.
    (8192, 4, 15.1, 246),
    (8192, 8, 14.2, 495),
    (8192, 16, 17.1, 773),
    (8192, 32, 23.9, 1162),
    (8192, 64, 33.6, 1643),
    (8192, 128, 51.5, 2308),
    (8192, 256, 75.4, 3161),
    (1024, 4, 13.1, 291),
    (1024, 8, 13.5, 509),
    (1024, 16, 14.9, 983),
)
"""vllm-project/tpu-inference#3050, the fastest sharding for each; answers of 1k."""
_QWEN_397B_FITTED = {(8192, 4), (8192, 32), (8192, 256)}
"""Their TPOT."""
_QWEN_397B_LATER = (
    # Pull request, prompt, requests at once, tok/s of prompts and answers together.
    (3079, 8192, 4, 2717.4),
    (3079, 8192, 8, 4860.2),
    (3079, 8192, 16, 8348.7),
    (3079, 8192, 32, 12504.3),
    (3079, 8192, 64, 17825.2),
    (3079, 8192, 128, 24904.6),
    (3079, 8192, 256, 32584.8),
    (3079, 1024, 4, 666.3),
    (3079, 1024, 8, 1213.1),
    (3079, 1024, 16, 2229.0),
    (3079, 1024, 32, 3659.5),
    (3079, 1024, 64, 5988.5),
    (3079, 1024, 128, 9146.1),
    (3116, 8192, 4, 3363.6),
    (3116, 8192, 8, 5115.5),
    (3116, 1024, 4, 946.3),
    (3116, 1024, 8, 1639.7),
)
"""The same engine some weeks of tuning later."""

_QWEN3_V6E = "sgl-project/sglang-jax qwen3_benchmark.md"
_QWEN3_8B = (
    # Prompt, requests at once, ITL and (of some) mean TTFT in ms, output tok/s.
    (1024, 8, 5.99, 117.55, 1311.49),
    (1024, 16, 6.62),
    (1024, 32, 8.18),
    (1024, 64, 11.11),
    (1024, 128, 17.06),
    (1024, 256, 30.00, 3793.50, 7571.84),
    (4096, 8, 6.61, 523.78, 1119.33),
    (4096, 16, 9.00),
    (4096, 32, 13.48),
    (4096, 64, 21.13, 4108.43, 2528.79),
    (8192, 8, 7.98, 1202.65, 867.68),
    (8192, 16, 11.48),
    (8192, 32, 19.22, 4876.89, 1330.11),
)
"""As far as all requests had room on v6e-4. In between, TTFT and tok/s follow from their neighbours."""
_QWEN3_FITTED = {
    ("qwen3-8b", 1024, 8): {_ITL},
    ("qwen3-8b", 1024, 256): {_ITL, _LINE_TTFT},
    ("qwen3-8b", 8192, 32): {_ITL, _LINE_TTFT},
    ("qwen3-32b", 1024, 8): {_ITL, _LINE_TTFT},
}
"""The ends, and another size, which tells bytes and layers apart."""
_QWEN3_32B = (
    (1024, 8, 18.29, 356.59, 427.69),
    (1024, 16, 19.16),
    (1024, 32, 22.17, 1429.91, 1355.93),
    (4096, 8, 19.88, 1557.02, 373.17),
    (4096, 16, 22.45),
    (8192, 8, 21.85, 3510.68, 315.90),
)


def _qwen_397b() -> tuple[_Run, ...]:
    def run(name: str, pull: int, prompt: int, batch: int, figures: Mapping[Measure, float]) -> _Run:
        return _Run(
            name=name,
            model="qwen3.5-397b-a17b",
            slice_name="tpu7x-4",
            source=f"vllm-project/tpu-inference#{pull}",
            num_requests=batch,
            prompt_tokens=prompt,
            figures=figures,
            fitted=frozenset({_LOAD_TPOT} if pull == 3050 and (prompt, batch) in _QWEN_397B_FITTED else ()),
        )

    first = (
        run("Qwen3.5-397B", 3050, prompt, batch, {_LOAD_TPOT: tpot, _LOAD_TOKENS: tokens})
        for prompt, batch, tpot, tokens in _QWEN_397B
    )
    later = (
        run(f"Qwen3.5-397B in #{pull}", pull, prompt, batch, {_LOAD_TOKENS: total * 1024 / (prompt + 1024)})
        for pull, prompt, batch, total in _QWEN_397B_LATER
    )
    return (*first, *later)


def _qwen3_v6e() -> tuple[_Run, ...]:
    sweeps = (("Qwen3-8B", "qwen3-8b", _QWEN3_8B), ("Qwen3-32B", "qwen3-32b", _QWEN3_32B))
    return tuple(
        _Run(
            name=name,
            model=model,
            slice_name="v6e-4",
            source=_QWEN3_V6E,
            num_requests=batch,
            prompt_tokens=prompt,
            figures=dict(zip((_ITL, _LINE_TTFT, _TOKENS), figures, strict=False)),
            fitted=frozenset(_QWEN3_FITTED.get((model, prompt, batch), ())),
        )
        for name, model, rows in sweeps
        for prompt, batch, *figures in rows
    )


_RECIPES = (
    _Run(
        name="Qwen3-8B",
        model="qwen3-8b",
        slice_name="tpu7x-4",
        source=f"{_COOKBOOK} Qwen3.md",
        num_requests=128,
        figures={_TPOT: 14.1, _TTFT: 943, _TOKENS: 8521},
        fitted=frozenset({_TPOT}),
    ),
    _Run(
        name="Llama-3.3-70B",
        model="llama-3.1-70b",
        slice_name="tpu7x-4",
        source=f"{_COOKBOOK} Llama3.3-70B.md",
        num_requests=128,
        figures={_TPOT: 30.8, _TTFT: 4800, _TOKENS: 3610},
        fitted=frozenset({_TPOT, _TTFT}),
    ),
    _Run(
        name="Qwen3-30B-A3B",
        model="qwen3-30b-a3b",
        slice_name="tpu7x-4",
        source=f"{_COOKBOOK} Qwen3-MoE.md",
        num_requests=128,
        figures={_TPOT: 18.9, _TOKENS: 6179},
        fitted=frozenset({_TPOT}),
    ),
    _Run(
        name="Qwen3.8-27B",
        model="qwen3.8-27b",
        slice_name="v6e-4",
        source=f"{_COOKBOOK} Qwen3.8.md",
        num_requests=8,
        prompt_tokens=512,
        output_tokens=128,
        chunk_tokens=512,
        figures={_TPOT: 18.52, _TTFT: 169.93, _TOKENS: 391.77},
    ),
    # Lengths at random from 0 to 1,024: their means.
    _Run(
        name="Llama-3.3-70B",
        model="llama-3.1-70b",
        slice_name="v6e-16",
        source=f"{_COOKBOOK} Llama3.3-70B.md",
        num_requests=16,
        prompt_tokens=506,
        output_tokens=524,
        figures={_LOAD_TPOT: 16.33, _LOAD_TOKENS: 882.17},
        reason="100 requests of unequal lengths in all: 14.5 of 16 at once on average",
    ),
    _Run(
        name="Qwen3-30B-A3B",
        model="qwen3-30b-a3b",
        slice_name="v6e-16",
        source=f"{_COOKBOOK} Qwen3-MoE.md",
        num_requests=16,
        prompt_tokens=506,
        output_tokens=524,
        figures={_LOAD_TPOT: 9.88, _LOAD_TOKENS: 1476.18},
        fitted=frozenset({_LOAD_TPOT}),
    ),
)

SERVING_POINTS: tuple[Point, ...] = tuple(
    point for run in (*_qwen_397b(), *_qwen3_v6e(), *_RECIPES) for point in run.points()
)
