"""A tiny model through the whole engine on the CPU backend: steps that overlap give the tokens of steps that do not,
cold and hit, in any chunks, alone and together, preempted or not, greedy and drawn."""

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
PLENTY, SHORT = 256, 60
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


def generate(engine: Engine, rows: list[int]) -> list[list[int]]:
    """The answers to these prompts together; each second one is drawn."""
    for row in rows:
        sampling = Sampling(temperature=row % 2, top_k=0, top_p=1, seed=row, max_tokens=NUM_NEW)
        engine.submit(EngineRequest(request_id=RequestId(str(row)), token_ids=PROMPTS[row], sampling=sampling))
    tokens: dict[str, list[int]] = {}
    while (report := engine.step()) is not None:
        for output in report.outputs:
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
    num_preemptions = 0
    for overlap, chunk, num_pages in product((False, True), (5, 512), (PLENTY, SHORT)):
        engine = fresh(overlap=overlap, chunk=chunk, num_pages=num_pages)
        for turn in ("cold", "hit"):
            assert generate(engine, list(range(len(PROMPTS)))) == expected, (overlap, chunk, num_pages, turn)
        assert engine.load().hit_tokens > 0
        num_preemptions += engine.load().num_preemptions
        alone = fresh(overlap=overlap, chunk=chunk)
        assert [generate(alone, [row])[0] for row in (3, 3)] == [expected[3]] * 2
    assert num_preemptions > 0
