"""Plans as bytes: whatever a scheduler plans comes out as it went in, and what is no plan is refused."""

import dataclasses
import random
import struct
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest

from ostrya.engine.config import EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.plan import Bucket, Entries, Mask, Processors, Scoring, StepPlan
from ostrya.engine.plan_codec import PlanDecoder, PlanEncoder
from ostrya.engine.types import EngineRequest, RequestId, Sampling
from tests.bench import slices
from tests.fakes.runner import FakeRunner


def same(one: object, other: object) -> bool:
    """Field by field, arrays with their types."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and bool(np.array_equal(one, other))
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in names)
    return type(one) is type(other) and one == other


def ints(draw: np.random.Generator, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return draw.integers(-1, 1 << 20, shape, dtype=np.int32)


def floats(draw: np.random.Generator, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return draw.random(shape, dtype=np.float32) * np.float32(3) - np.float32(1)


def entries(draw: np.random.Generator, size: int) -> Entries:
    return Entries(row=ints(draw, size), token=ints(draw, size), value=floats(draw, size))


def processors(draw: np.random.Generator, rows: int) -> Processors:
    num_masks = int(draw.integers(0, rows + 1))
    return Processors(
        bias=entries(draw, int(draw.integers(0, 9))),
        seen=entries(draw, int(draw.integers(0, 30))),
        repetition_penalty=floats(draw, rows),
        presence_penalty=floats(draw, rows),
        frequency_penalty=floats(draw, rows),
        min_p=floats(draw, rows),
        typical_p=floats(draw, rows),
        mask=Mask(row=ints(draw, num_masks), words=ints(draw, num_masks, 5)) if draw.random() < 0.5 else None,
    )


def scoring(draw: np.random.Generator) -> Scoring:
    num_rows, num_prompt = draw.integers(0, 5, 2).tolist()
    return Scoring(
        row=ints(draw, num_rows),
        index=ints(draw, num_prompt),
        target=ints(draw, num_prompt),
        num_top=ints(draw, num_rows + num_prompt),
    )


def plans(seed: int, *, number: int) -> Iterator[StepPlan]:
    """Any that the types allow, over a table of which something changes each time; now and then one without slots."""
    draw = np.random.default_rng(seed)
    table = np.zeros((12, 32), np.int32)
    for _ in range(number):
        rows, pages = int(draw.choice((4, 8, 16))), int(draw.choice((4, 16, 32)))
        num_rows = int(draw.integers(1, min(rows, 12) + 1))
        tokens = int(draw.choice((rows, 32)))
        changed = draw.random(table.shape) < 0.05
        table[changed] = draw.integers(0, 4000, changed.sum())
        slots = draw.permutation(12)[:num_rows].astype(np.int32)
        page_table = np.zeros((rows, pages), np.int32)
        page_table[:num_rows] = table[slots, :pages]
        yield StepPlan(
            bucket=Bucket(tokens, rows, pages),
            num_tokens=int(draw.integers(num_rows, tokens + 1)),
            num_rows=num_rows,
            num_decode_rows=int(draw.integers(0, num_rows + 1)),
            token_ids=ints(draw, tokens),
            token_source=ints(draw, tokens),
            positions=ints(draw, tokens),
            slot_mapping=ints(draw, tokens),
            query_start=ints(draw, rows + 1),
            kv_lens=ints(draw, rows),
            page_table=page_table,
            logits_index=ints(draw, rows),
            temperature=floats(draw, rows),
            top_k=ints(draw, rows),
            top_p=floats(draw, rows),
            uniform=floats(draw, rows),
            wants_token=draw.random(rows) < 0.5,
            processors=processors(draw, rows) if draw.random() < 0.5 else None,
            scoring=scoring(draw) if draw.random() < 0.5 else None,
            slots=slots if draw.random() < 0.9 else None,
        )


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_plans_comes_out_as_it_went_in(seed: int) -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    for plan in plans(seed, number=40):
        decoded = decoder.decode(bytearray(encoder.encode(plan)))
        assert same(decoded, plan)
        assert decoded.token_ids.flags.writeable, "torch wants arrays that it could write to"


def test_all_plans_of_an_engine_with_hits_preemption_and_every_kind_of_row_come_out_as_they_went_in() -> None:
    config = EngineConfig(
        model_path="/", model_name="m", tokenizer_fingerprint="", num_pages=40, page_size=4, max_running=6
    )
    runner = FakeRunner(num_pages=config.num_pages, page_size=config.page_size)
    engine = Engine(runner, config, context_tokens=256, eos_token_ids=())
    kinds = [{}, {"repetition_penalty": 1.5}, {"logit_bias": {5: 3.0}}, {"num_top": 2, "num_prompt_top": 1}]
    choose = random.Random(3)
    for number in range(16):
        sampling = Sampling(
            temperature=number % 2,
            top_k=0,
            top_p=1,
            seed=number,
            max_tokens=20,
            **choose.choice(kinds),  # type: ignore[arg-type]
        )
        prompt = [3 + at % 7 for at in range(choose.randrange(1, 40))]
        engine.submit(EngineRequest(request_id=RequestId(f"{number}"), token_ids=prompt, sampling=sampling))
    encoder, decoder, num_bytes = PlanEncoder(), PlanDecoder(), 0
    while engine.step() is not None:
        while num_bytes < len(runner.plans):
            plan = runner.plans[num_bytes]
            assert same(decoder.decode(bytearray(encoder.encode(plan))), plan)
            assert plan.slots is not None
            num_bytes += 1
    assert engine.load().num_preemptions > 0
    assert engine.load().hit_tokens > 0


def test_a_step_of_256_rows_of_8k_tokens_fits_into_64_kib() -> None:
    encoder = PlanEncoder()
    first, *sizes = (len(encoder.encode(plan)) for plan in islice(slices.plans(256), 20))
    assert max(sizes) <= slices.GOAL_BYTES < first, "only the first tells all pages"


def test_a_message_that_is_cut_or_damaged_is_a_value_error() -> None:
    draw = random.Random(5)
    for seed in range(8):
        messages = [bytearray(encoder.encode(plan)) for encoder in [PlanEncoder()] for plan in plans(seed, number=4)]
        for message in messages:
            for end in (0, 3, 31, len(message) // 2, len(message) - 1):
                with pytest.raises(ValueError, match="plan"):
                    PlanDecoder().decode(message[:end])
            with pytest.raises(ValueError, match="should have"):
                PlanDecoder().decode(message + b"\0\0\0\0")
        for _ in range(200):
            damaged = bytearray(draw.choice(messages))
            struct.pack_into("<I", damaged, 4 * draw.randrange(len(damaged) // 4), draw.getrandbits(32))
            try:
                PlanDecoder().decode(damaged)
            except ValueError:
                continue


def test_padding_rows_with_pages_are_a_bug_that_is_told() -> None:
    (plan,) = plans(0, number=1)
    assert plan.num_rows < plan.bucket.rows
    plan.page_table[-1, 0] = 1
    with pytest.raises(ValueError, match="padding rows"):
        PlanEncoder().encode(plan)
