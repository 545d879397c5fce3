"""A tiny model through the whole engine on the CPU backend: steps that overlap give the tokens of steps that do not,
cold and then hit, in any chunks, alone and together, preempted or not, greedy and drawn, with penalties and without."""

from collections import Counter
from collections.abc import Iterator
from itertools import product

import msgspec
import pytest

from ostrya.engine.backends.cpu import CpuRunner, load_runner
from ostrya.engine.config import EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.types import EngineRequest, RequestId, Sampling
from tests.unit.engine.models.checkpoints import Tiny, write_gguf

TINY = Tiny()
SHARED = [(5 * at) % 90 + 3 for at in range(24)]
PROMPTS = [[*SHARED[: 8 * (row % 4)], *((7 * row + 3 * at) % 90 + 3 for at in range(4 + 9 * row))] for row in range(6)]
NUM_NEW = 14
PLENTY, SHORT = 256, 46
"""Pages: the second holds the prompts of all, and not the answers."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CpuRunner, EngineConfig]]:
    path = write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", TINY, TINY.weights())
    config = EngineConfig(
        model_path=str(path),
        model_name="tiny",
        tokenizer_fingerprint="",
        dtype="float32",
        page_size=4,
        num_pages=PLENTY,
        max_running=8,
        num_threads=1,
    )
    runner, _ = load_runner(config)
    yield runner, config
    runner.close()


WANTS: list[dict[str, object]] = [
    {},
    {"top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "num_top": 2},
    {"frequency_penalty": 2.0, "presence_penalty": 1.0, "num_prompt_top": 1},
    {"bad_words": ((5, 6), (7,)), "logit_bias": {5: 3.0, 6: 3.0}},
    {"min_tokens": 6, "stop_token_ids": frozenset(range(0, 96, 3))},
]
"""By prompt: history that the device has to add to (penalties), history that the host must know (bad words)."""


def generate(engine: Engine, rows: list[int]) -> list[list[int]]:
    """The answers to these prompts together; each second one is drawn."""
    for row in rows:
        plain = Sampling(temperature=row % 2, top_k=0, top_p=1, seed=row, max_tokens=NUM_NEW)
        sampling = msgspec.structs.replace(plain, **WANTS[row])
        engine.submit(EngineRequest(request_id=RequestId(str(row)), token_ids=PROMPTS[row], sampling=sampling))
    tokens: dict[str, list[int]] = {}
    while (report := engine.step()) is not None:
        for output in report.outputs:
            row = int(output.request_id)
            assert len(output.scores) == ("num_top" in WANTS[row])
            if output.request_id not in tokens:
                assert len(output.prompt_scores) == ("num_prompt_top" in WANTS[row]) * (len(PROMPTS[row]) - 1)
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.scheduler.pool.check()
    assert engine.scheduler.pool.num_referenced == 0
    return [tokens[str(row)] for row in rows]


def test_overlap_changes_no_token(loaded: tuple[CpuRunner, EngineConfig]) -> None:
    runner, config = loaded

    def fresh(*, overlap: bool, chunk: int = 512, num_pages: int = PLENTY) -> Engine:
        settings = msgspec.structs.replace(config, overlap=overlap, max_prefill_chunk_tokens=chunk, num_pages=num_pages)
        return Engine(runner, settings, context_tokens=TINY.context_tokens, eos_token_ids=())

    expected = [generate(fresh(overlap=False), [row])[0] for row in range(len(PROMPTS))]
    num_preemptions = Counter[bool]()
    for overlap, chunk, num_pages in product((False, True), (5, 512), (PLENTY, SHORT)):
        engine = fresh(overlap=overlap, chunk=chunk, num_pages=num_pages)
        # Without the row that needs the host, which holds up every plan; then with it.
        for rows in ([0, 1, 2, 3, 5], list(range(len(PROMPTS)))):
            assert generate(engine, rows) == [expected[row] for row in rows], (overlap, chunk, num_pages, rows)
        assert engine.load().hit_tokens > 0
        num_preemptions[overlap] += engine.load().num_preemptions
        alone = fresh(overlap=overlap, chunk=chunk)
        assert [generate(alone, [row])[0] for row in (2, 2)] == [expected[2]] * 2
    assert num_preemptions[False] > 0
    assert num_preemptions[True] > 0
