"""Every step fits one of few shapes."""

from hypothesis import given
from hypothesis import strategies as st

from ostrya.engine.buckets import Growth, Ladder, ladder
from ostrya.engine.plan import Bucket

SMOLLM2 = ladder(max_running=16, max_step_tokens=512, page_size=16, context_tokens=8192)


@st.composite
def ladders_and_steps(draw: st.DrawFn) -> tuple[Ladder, int, int, int]:
    max_running = draw(st.integers(1, 70))
    max_step_tokens = draw(st.integers(max_running, 1500))
    page_size = draw(st.sampled_from([1, 4, 16, 128]))
    context_tokens = draw(st.integers(1, 20_000))
    rows = draw(st.integers(1, max_running))
    tokens = draw(st.integers(rows, max_step_tokens))
    pages = draw(st.integers(1, -(-context_tokens // page_size)))
    shapes = ladder(
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        page_size=page_size,
        context_tokens=context_tokens,
        growth=draw(st.sampled_from([Growth(), Growth(rows=4, tokens=8, pages=4), Growth(pages=None)])),
    )
    return shapes, rows, tokens, pages


@given(ladders_and_steps())
def test_every_fitted_bucket_is_in_the_ladder_and_large_enough(case: tuple[Ladder, int, int, int]) -> None:
    shapes, rows, tokens, pages = case
    bucket = shapes.fit(rows=rows, tokens=tokens, pages=pages)
    assert bucket in shapes.buckets
    assert (bucket.rows >= rows, bucket.tokens >= tokens, bucket.pages >= pages) == (True, True, True)


def test_default_engine_has_few_shapes() -> None:
    assert len(SMOLLM2.buckets) == (3 + 6 - 1) * 6


def test_a_backend_that_compiles_for_seconds_asks_for_fewer_shapes() -> None:
    def shapes(growth: Growth) -> Ladder:
        return ladder(max_running=16, max_step_tokens=512, page_size=16, context_tokens=8192, growth=growth)

    few = shapes(Growth(rows=4, tokens=8, pages=4))
    assert (few.rows, few.tokens, few.pages) == ((4, 16), (16, 128, 512), (16, 64, 256, 512))
    assert shapes(Growth(pages=None)).pages == SMOLLM2.pages[-1:]


def test_decode_step_has_as_many_tokens_as_rows() -> None:
    assert SMOLLM2.fit(rows=1, tokens=1, pages=3) == Bucket(4, 4, 16)
    assert SMOLLM2.fit(rows=5, tokens=5, pages=17) == Bucket(8, 8, 32)


def test_mixed_step_has_the_largest_row_bucket() -> None:
    assert SMOLLM2.fit(rows=1, tokens=17, pages=512) == Bucket(32, 16, 512)
