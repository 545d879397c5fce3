"""Facts of the report, its JSON's keys, and that the text says them."""

import re
from collections.abc import Iterator
from dataclasses import replace
from time import process_time

import msgspec
import pytest

from ostrya.capacity.chips import SLICES, find_slice
from ostrya.capacity.compare import compare
from ostrya.capacity.estimate import FACTORS, leave_one_out, residuals
from ostrya.capacity.facts import Both, Report, Setup
from ostrya.capacity.memory import DoesNotFit, Placement
from ostrya.capacity.models import find_model, models
from ostrya.capacity.published import Engine, Use
from ostrya.capacity.render import as_text
from ostrya.capacity.render_check import check_text
from ostrya.capacity.render_search import comparison_text
from ostrya.capacity.report import batch_ladder, report
from ostrya.capacity.serving import prefill
from ostrya.capacity.spec import FP8, with_weights
from ostrya.capacity.values import count, duration, size, table, three
from ostrya.errors import ConfigError

SETUP = Setup(context_tokens=8192, num_requests=1, prompt_tokens=8192, engine=Engine.SERVING)
GSM8K = (0.86, 0.71, 0.59, 0.48, 0.39, 0.32, 0.26)
"""Kimi K3's DSpark on GSM8K (speculative.md 1.3)."""
WIDEST_LINE = 130


@pytest.fixture(scope="module")
def k3() -> Report:
    setup = replace(SETUP, num_draft_tokens=7, acceptance_rates=GSM8K)
    return report(find_model("kimi-k3"), find_slice("tpu7x-16"), setup)


def test_the_limit_of_k3_is_what_its_bytes_give() -> None:
    empty = report(find_model("kimi-k3"), find_slice("tpu7x-16"), replace(SETUP, context_tokens=0))
    # 1.157 ms of weights, and the recurrent state read and written.
    assert 1.157e-3 <= empty.decoding.tpot_s.limit <= 1.165e-3
    assert 858 <= empty.decoding.tokens_per_s.limit <= 864.5
    assert {one.bound_by for one in empty.bounds if one.share_ratio.limit > 0.01} == {"memory"}


def test_memory_adds_up(k3: Report) -> None:
    fit = k3.fit
    used = fit.weights_bytes + fit.drafter_bytes + fit.scratch_bytes + fit.cache_bytes + fit.state_bytes
    assert used + fit.free_bytes == pytest.approx(fit.usable_bytes)
    assert sum(part.num_bytes for part in k3.model.parts) == pytest.approx(k3.model.weights_bytes)


def test_the_largest_batch_and_context_fit_and_one_more_does_not(k3: Report) -> None:
    spec, where = find_model("kimi-k3"), find_slice("tpu7x-16")
    most = report(spec, where, SETUP).fit.max_requests
    assert report(spec, where, replace(SETUP, num_requests=most)).fit.free_bytes >= 0
    with pytest.raises(DoesNotFit):
        report(spec, where, replace(SETUP, num_requests=most + 1))
    small = find_slice("v5e-1")
    dense = find_model("llama-3.1-8b")
    narrow = with_weights(dense, FP8)
    longest = report(narrow, small, SETUP).fit.max_context_tokens
    assert SETUP.context_tokens < longest < dense.max_context_tokens
    assert report(narrow, small, replace(SETUP, context_tokens=longest)).fit.max_requests == 1
    with pytest.raises(DoesNotFit):
        report(narrow, small, replace(SETUP, context_tokens=longest + 1))


@pytest.mark.parametrize("name", sorted(models()))
def test_shares_add_up_and_no_estimate_beats_its_limit(name: str) -> None:
    spec = find_model(name)
    setup = replace(SETUP, num_requests=2)
    where = next(row.slice_name for row in compare(spec, setup) if row.decoding)
    found = report(spec, find_slice(where), setup)
    for which in ("limit", "estimate"):
        assert sum(getattr(one.share_ratio, which) for one in found.bounds) == pytest.approx(1)
        seconds = sum(getattr(one.seconds, which) for one in found.bounds)
        assert seconds == pytest.approx(getattr(found.decoding.tpot_s, which))
    times = [found.decoding.tpot_s, found.prompt.ttft_s, *(one.tpot_s for one in found.batches)]
    assert all(one.limit <= one.estimate for one in times)
    assert all(one.saves_s.limit <= one.saves_s.estimate for one in found.prefix_hits)
    throughput = [one.tokens_per_s.estimate for one in found.batches]
    assert throughput == sorted(throughput)


def test_speculation_is_compared_with_plain_steps(k3: Report) -> None:
    one = k3.speculation
    assert one
    assert one.acceptance_length == pytest.approx(1 + sum(GSM8K))
    assert one.tokens_per_s
    assert one.speedup_ratio
    assert one.tokens_per_s.limit == pytest.approx(k3.decoding.tokens_per_s.limit * one.speedup_ratio.limit)
    assert one.break_even_length.limit == pytest.approx(one.round_s.limit / k3.decoding.tpot_s.limit)
    assert one.tokens_per_s_by_draft[0].limit == pytest.approx(k3.decoding.tokens_per_s.limit)
    assert one.tokens_per_s_by_draft[7].limit == pytest.approx(one.tokens_per_s.limit)
    estimates = [both.estimate for both in one.tokens_per_s_by_draft]
    assert one.best_num_draft_tokens == estimates.index(max(estimates))


def test_speculation_without_acceptance_still_tells_the_break_even_length() -> None:
    found = report(find_model("kimi-k3"), find_slice("tpu7x-16"), replace(SETUP, num_draft_tokens=7)).speculation
    assert found
    assert found.break_even_length.limit > 2
    assert (found.tokens_per_s, found.speedup_ratio, found.best_num_draft_tokens) == (None, None, None)


def test_a_longer_prefix_hit_saves_more(k3: Report) -> None:
    saved = [one.saves_s.estimate for one in k3.prefix_hits]
    assert saved == sorted(saved)
    assert saved[0] > 0
    assert saved[-1] < k3.prompt.ttft_s.estimate


@pytest.mark.parametrize(
    "setup",
    [
        replace(SETUP, context_tokens=10**7),
        replace(SETUP, prompt_tokens=10**7),
        replace(SETUP, num_draft_tokens=8),
        replace(SETUP, num_draft_tokens=3, acceptance_length=4.5),
        replace(SETUP, num_draft_tokens=3, acceptance_length=0.5),
        replace(SETUP, num_draft_tokens=2, acceptance_rates=(0.5, 0.6)),
    ],
)
def test_what_makes_no_sense_is_one_line(setup: Setup) -> None:
    with pytest.raises(ConfigError) as raised:
        report(find_model("kimi-k3"), find_slice("tpu7x-16"), setup)
    assert "\n" not in str(raised.value)


def paths(value: object, at: str = "") -> Iterator[str]:
    """Every key of a document; of a list, those of its first element."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, f"{at}.{key}" if at else key)
    elif isinstance(value, list) and value:
        yield from paths(value[0], f"{at}[]")
    else:
        yield at


BOTH = ("limit", "estimate")
DECODING = ("tpot_s", "tokens_per_s", "tokens_per_s_per_user", "tokens_per_s_per_chip")
KEYS = {
    *(f"setup.{key}" for key in ("context_tokens", "num_requests", "prompt_tokens", "engine", "placement")),
    *(f"setup.{key}" for key in ("chunk_tokens", "num_draft_tokens", "acceptance_rates[]", "acceptance_length")),
    *(f"model.{key}" for key in ("name", "num_layers", "max_context_tokens", "num_params")),
    *(f"model.{key}" for key in ("num_params_active_decode", "num_params_active_prefill", "weights_bytes", "drafter")),
    *(f"model.{key}" for key in ("drafter_bytes", "kv_storage", "kv_bytes_per_token", "state_storage")),
    *("model.window_bytes_per_request", "model.state_bytes_per_request", "model.num_params_active_with_embedding"),
    *(f"model.parts[].{key}" for key in ("part", "num_params", "num_params_active", "storage", "num_bytes")),
    *(f"slice.{key}" for key in ("name", "generation", "topology", "accelerator", "machine_type")),
    *("slice.num_chips", "slice.num_hosts"),
    *(f"slice.{key}" for key in ("hbm_bytes", "hbm_bytes_per_s", "peak_flops_per_s.bf16", "peak_flops_per_s.fp8")),
    *(f"fit.{key}_bytes" for key in ("hbm", "usable", "weights", "drafter", "scratch", "cache", "state", "free")),
    *(f"fit.{key}" for key in ("max_requests", "max_context_tokens")),
    *(f"fit.max_requests_by_placement.{key}" for key in ("spread", "tensor-parallel")),
    *(f"{at}.num_requests" for at in ("decoding", "batches[]")),
    *(f"{at}.{key}.{which}" for at in ("decoding", "batches[]") for key in DECODING for which in BOTH),
    *("prompt.prompt_tokens", "prompt.limit_bound_by", "prompt.bound_by"),
    *(f"prompt.{key}.{which}" for key in ("ttft_s", "prefill_tokens_per_s") for which in BOTH),
    "bound_by",
    *("fitted_generations[]", "fitted_num_chips[]", "fitted_max_requests", "warning"),
    *(f"bounds[].{key}" for key in ("name", "num_bytes", "num_flops", "bound_by")),
    *(f"bounds[].{key}.{which}" for key in ("seconds", "share_ratio") for which in BOTH),
    *(f"speculation.{key}" for key in ("num_draft_tokens", "drafter", "acceptance_length", "best_num_draft_tokens")),
    *(
        f"speculation.{key}.{which}"
        for key in ("round_s", "break_even_length", "tokens_per_s", "speedup_ratio", "tokens_per_s_by_draft[]")
        for which in BOTH
    ),
    "prefix_hits[].hit_tokens",
    *(f"prefix_hits[].saves_s.{which}" for which in BOTH),
}
"""Scripts read these: a key may be added, never renamed."""


def test_the_keys_of_the_json_are_these(k3: Report) -> None:
    assert set(paths(msgspec.json.decode(msgspec.json.encode(k3)))) == KEYS


def test_the_text_says_the_facts(k3: Report) -> None:
    text = as_text(k3)
    for words in (
        "kimi-k3 on tpu7x-16",
        "16 chips on 4 hosts (2x2x4, tpu7x-standard-4t)",
        "2.78 T parameters, 104 B active",
        "13.8 KB per token (fp8) and 434 MB of recurrent state (fp32)",
        "Largest batch at 8,192 tokens, by placement of the cache:",
        f"data-parallel attention)  {k3.fit.max_requests:,}",
        f"limit, in one step, bound by {k3.prompt.limit_bound_by};",
        f"estimate, in chunks of 2,048, by {k3.prompt.bound_by}.",
        "WHAT BOUNDS A STEP",
        "SPECULATION  7 tokens drafted by DSpark",
        "tokens/s at length 4.61",
        "4,096 of 8,192 tokens",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= WIDEST_LINE
    assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize("name", sorted(models()))
def test_every_ready_model_has_a_report_on_a_slice_that_holds_it(name: str) -> None:
    spec = find_model(name)
    where = next(row.slice_name for row in compare(spec, SETUP) if row.decoding)
    for engine in Engine:
        assert as_text(report(spec, find_slice(where), replace(SETUP, engine=engine))).startswith(
            f"{name} on {where}\n"
        )


def test_a_comparison_has_every_slice_and_says_what_is_missing() -> None:
    spec = find_model("kimi-k3")
    rows = compare(spec, SETUP)
    assert [row.slice_name for row in rows] == [where.name for where in SLICES]
    for row in rows:
        assert (row.missing_bytes > 0) == (row.decoding is None) == (row.max_requests == 0)
    text = comparison_text(spec.name, SETUP, rows)
    assert all(where.name in text for where in SLICES)
    assert "lacks" in text


def test_the_check_shows_every_point_with_its_use_and_its_source() -> None:
    rows = residuals()
    unseen = leave_one_out()
    text = check_text(rows, unseen, FACTORS)
    lines = text.splitlines()
    for row in rows:
        point = row.point
        start = re.compile(
            rf"  {re.escape(point.name)}  +({point.slice_name} )? *{three(point.value)}  {point.measure.value}  "
        )
        (line,) = (one for one in lines if start.match(one))
        if point.use is Use.NOT_COMPARABLE:
            assert point.reason in line
        else:
            assert row.error_ratio is not None
            assert f" {row.error_ratio:+.0%} " in line
            assert f" {point.use.value} " in line
        assert point.source in text
        if point.use is Use.FITTED:
            (without,) = (one for one in unseen if one.point is point)
            assert without.error_ratio is not None
            assert f" {without.error_ratio:+.0%} " in line
    assert max(map(len, lines)) <= 130
    assert all(f"{one.dense_bandwidth_ratio:.0%}" in text for one in FACTORS.values())


def test_an_estimate_says_when_its_factors_are_from_another_generation() -> None:
    spec = find_model("llama-3.1-8b")
    carried = "Nothing published for v5p: factors are carried over from v6e."
    assert carried in as_text(report(spec, find_slice("v5p-8"), SETUP))
    assert "carried over" not in as_text(report(spec, find_slice("v6e-4"), SETUP))
    assert "carried over" not in as_text(report(spec, find_slice("tpu7x-4"), SETUP))


def test_a_report_takes_at_most_a_third_of_a_second() -> None:
    setup = replace(SETUP, num_draft_tokens=7, acceptance_rates=GSM8K)
    start = process_time()
    report(find_model("kimi-k3"), find_slice("tpu7x-16"), setup)
    assert process_time() - start <= 0.3


def test_both_placements_have_their_largest_batch(k3: Report) -> None:
    spec, where = find_model("kimi-k3"), find_slice("tpu7x-16")
    setup = replace(k3.setup, placement=Placement.TENSOR_PARALLEL)
    other = report(spec, where, setup).fit
    assert other.max_requests_by_placement == k3.fit.max_requests_by_placement
    assert k3.fit.max_requests_by_placement["spread"] == k3.fit.max_requests > other.max_requests
    assert other.max_requests_by_placement["tensor-parallel"] == other.max_requests


def test_an_estimate_warns_beyond_the_slices_and_batches_it_was_fitted_on() -> None:
    spec = find_model("kimi-k3")
    inside = report(spec, find_slice("tpu7x-16"), replace(SETUP, engine=Engine.FUSED))
    assert inside.fitted_num_chips == (4, 16)
    assert "Warning" not in as_text(inside)
    many = inside.fitted_max_requests + 1
    outside = as_text(report(spec, find_slice("tpu7x-16"), replace(SETUP, engine=Engine.FUSED, num_requests=many)))
    assert "Warning: factors fitted on 4-chip and 16-chip slices, to batch " in outside
    assert "Warning: factors fitted on 4-chip slices" in as_text(report(spec, find_slice("tpu7x-16"), SETUP))


def test_active_parameters_are_told_as_announced_too() -> None:
    flash = report(find_model("deepseek-v4-flash"), find_slice("tpu7x-16"), SETUP)
    assert flash.model.num_params_active_with_embedding == pytest.approx(13.9e9, rel=0.02)
    assert "as its makers count, with the embedding" in as_text(flash)


def test_a_ladder_of_batches_doubles_up_to_the_largest() -> None:
    assert batch_ladder(1) == (1,)
    assert batch_ladder(8) == (1, 2, 4, 8)
    assert batch_ladder(10) == (1, 2, 4, 8, 10)


def test_values_are_short_and_have_units() -> None:
    assert (count(2.779e12), count(134.5e6), size(1.5622e12), size(880.0)) == ("2.78 T", "134 M", "1.56 TB", "880 B")
    assert (duration(1.163e-3), duration(2.0), duration(12.34e-6)) == ("1.16 ms", "2.00 s", "12.3 µs")
    assert table([("a", "bb"), ("ccc", "d")]) == ["  a    bb", "  ccc   d"]
    assert Both(limit=1, estimate=2).limit == 1


def test_the_limit_of_a_prompt_is_one_step_however_an_engine_cuts_it() -> None:
    spec, where = find_model("kimi-k3"), find_slice("tpu7x-16")
    small, large = (report(spec, where, replace(SETUP, chunk_tokens=tokens)) for tokens in (512, 8192))
    assert small.prompt.ttft_s.limit == large.prompt.ttft_s.limit
    assert small.prompt.ttft_s.estimate > large.prompt.ttft_s.estimate
    for chunk_tokens in (512, 2048, 4096, 8192):
        assert prefill(spec, where, 8192, chunk_tokens=chunk_tokens).seconds >= small.prompt.ttft_s.limit
    saved = {hit.hit_tokens: hit.saves_s.limit for hit in small.prefix_hits}
    warm = prefill(spec, where, 8192, cached_tokens=4096, chunk_tokens=8192)
    assert saved[4096] == small.prompt.ttft_s.limit - warm.seconds


def test_what_windows_hold_is_told_apart_from_what_grows() -> None:
    where = find_slice("tpu7x-4")
    setup = replace(SETUP, num_requests=1)
    gpt = as_text(report(find_model("gpt-oss-120b"), where, setup))
    # 18 of 36 layers keep everything, 18 a window of 128; keys and values of 8 heads of 64 in bf16.
    assert "A request keeps 36.9 KB per token beyond its windows, which hold 4.72 MB (bf16)." in gpt
    assert "A request keeps 131 KB per token (bf16)." in as_text(report(find_model("llama-3.1-8b"), where, setup))


def test_a_comparison_says_where_its_estimates_are_from() -> None:
    spec = find_model("llama-3.1-8b")
    text = comparison_text(spec.name, SETUP, compare(spec, SETUP))
    origin = "Estimate: serving, fitted on v6e (4 and 16 chips, to batch 256), tpu7x (4 chips, to batch 256);"
    assert f"{origin} elsewhere carried over from v6e." in text
    assert "0.00" not in text
