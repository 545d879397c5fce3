"""Facts of the report, its JSON's keys, and that the text says them."""

import re
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from ostrya.capacity.chips import SLICES, find_slice
from ostrya.capacity.compare import Row, compare
from ostrya.capacity.estimate import FACTORS, Residual, residuals
from ostrya.capacity.facts import Both, Bound, Decoding, PrefixHit, Prompt, Report, Setup, Speculation
from ostrya.capacity.memory import DoesNotFit, Placement
from ostrya.capacity.models import find_model, models
from ostrya.capacity.published import Engine, Use
from ostrya.capacity.render import as_text
from ostrya.capacity.render_check import check_text
from ostrya.capacity.render_search import comparison_text, list_text
from ostrya.capacity.report import batch_ladder, model_facts, report, slice_facts
from ostrya.capacity.serving import prefill
from ostrya.capacity.spec import FP8, with_weights
from ostrya.capacity.values import FLOP_SCALES, count, duration, per_time, scaled, size, table, three, unknown
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
    fit = report(find_model("kimi-k3"), find_slice("tpu7x-16"), replace(k3.setup, num_requests=3)).fit
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


@pytest.mark.parametrize(("batch", "placement"), [(1, Placement.SPREAD), (4, Placement.TENSOR_PARALLEL)])
def test_speculation_is_compared_with_plain_steps(batch: int, placement: Placement) -> None:
    setup = replace(SETUP, num_draft_tokens=7, acceptance_rates=GSM8K, num_requests=batch, placement=placement)
    found = report(find_model("kimi-k3"), find_slice("tpu7x-16"), setup)
    plain, one = found.decoding, found.speculation
    assert one
    assert one.acceptance_length == pytest.approx(1 + sum(GSM8K))
    assert one.tokens_per_s
    assert one.speedup_ratio
    assert one.tokens_per_s.limit == pytest.approx(batch * (1 + sum(GSM8K)) / one.round_s.limit)
    assert one.tokens_per_s.limit == pytest.approx(plain.tokens_per_s.limit * one.speedup_ratio.limit)
    assert one.break_even_length.limit == pytest.approx(one.round_s.limit / plain.tpot_s.limit)
    assert one.tokens_per_s_by_draft[0].limit == pytest.approx(plain.tokens_per_s.limit)
    assert one.tokens_per_s_by_draft[7].limit == pytest.approx(one.tokens_per_s.limit)
    estimates = [both.estimate for both in one.tokens_per_s_by_draft]
    assert one.best_num_draft_tokens == estimates.index(max(estimates))


def test_speculation_without_acceptance_still_tells_the_break_even_length() -> None:
    found = report(find_model("kimi-k3"), find_slice("tpu7x-16"), replace(SETUP, num_draft_tokens=7)).speculation
    assert found
    assert found.break_even_length.limit > 2
    assert (found.tokens_per_s, found.speedup_ratio, found.best_num_draft_tokens) == (None, None, None)


@pytest.fixture(scope="module")
def llama() -> Report:
    setup = replace(SETUP, num_requests=8, prompt_tokens=8000, chunk_tokens=512)
    return report(find_model("llama-3.1-8b"), find_slice("tpu7x-4"), setup)


def test_a_dense_models_report_is_arithmetic_by_hand(llama: Report) -> None:
    """Llama 3.1 8B in bf16 on four TPU7x chips: 192 GiB, 7.40 TB/s, 2,307 TFLOP/s and two devices each."""
    bytes_per_s, flops_per_s = 4 * 7.40e12, 4 * 2307e12
    # 32 layers: q, o of 4096 x 4096, k, v of 4096 x 1024; three of 4096 x 14336; two norms. 128,256 tokens.
    attention, ffn, norms, table = 32 * 41_943_040, 32 * 176_160_768, 32 * 8192, 128_256 * 4096
    kv_bytes = 32 * 2 * 8 * 128 * 2
    model = llama.model
    # The last norm; the embedding is looked up.
    assert model.num_params == attention + ffn + norms + 4096 + 2 * table == 8_030_261_248
    assert model.num_params_active_decode == model.num_params_active_prefill == 8_030_261_248 - table
    assert [part.part for part in model.parts] == ["dense ffn", "attention", "embedding", "head", "norms"]
    assert (model.weights_bytes, model.kv_bytes_per_token) == (2 * 8_030_261_248, kv_bytes)
    assert (model.window_bytes_per_request, model.state_bytes_per_request, model.drafter_bytes) == (0, 0, 0)
    assert (model.num_params_active_with_embedding, model.drafter) == (None, None)
    fit = llama.fit
    assert (fit.hbm_bytes, fit.weights_bytes) == (4 * 192 * 2**30, 2 * 8_030_261_248)
    assert (fit.cache_bytes, fit.state_bytes, fit.drafter_bytes) == (8 * 8192 * kv_bytes, 0, 0)
    # Eight vectors of 4096 in bf16 on eight devices, of a chunk and of every row, with its logits twice in fp32.
    chunk_bytes, row_bytes = 512 * 8 * 4096 * 2 * 8, 8 * 4096 * 2 * 8 + 2 * 128_256 * 4
    assert fit.scratch_bytes == chunk_bytes + 8 * row_bytes
    assert fit.usable_bytes == 0.9 * 4 * 192 * 2**30
    room_bytes = fit.usable_bytes - fit.weights_bytes - chunk_bytes
    most = room_bytes // (8192 * kv_bytes + row_bytes)
    # As many KV heads as devices: no copies.
    assert fit.max_requests_by_placement == {"spread": most, "tensor-parallel": most}
    assert fit.max_requests == most

    def tpot_s(batch: int) -> float:
        # All weights but the embedding's, a row of it each; a cache of 8,192 tokens read and one written.
        weights_bytes = 2 * (attention + ffn + norms + 4096 + table)
        return (weights_bytes + batch * (2 * 4096 + 8193 * kv_bytes)) / bytes_per_s

    assert [one.num_requests for one in llama.batches] == list(batch_ladder(fit.max_requests))
    assert llama.decoding.num_requests == 8
    for one in (llama.decoding, *llama.batches[:6]):
        assert one.tpot_s.limit == pytest.approx(tpot_s(one.num_requests))
    for one in (llama.decoding, *llama.batches):
        for which in BOTH:
            step_s, batch = getattr(one.tpot_s, which), one.num_requests
            assert getattr(one.tokens_per_s, which) == pytest.approx(batch / step_s)
            assert getattr(one.tokens_per_s_per_user, which) == pytest.approx(1 / step_s)
            assert getattr(one.tokens_per_s_per_chip, which) == pytest.approx(batch / step_s / 4)
    limits = {bound.name: bound.seconds.limit for bound in llama.bounds}
    assert limits["dense ffn"] == pytest.approx(2 * ffn / bytes_per_s)
    assert limits["kv cache"] == pytest.approx(8 * 8193 * kv_bytes / bytes_per_s)
    assert limits["overhead"] == limits["collectives"] == 0
    # Launching 32 layers takes 32 x 211 µs; their weights half a millisecond.
    estimates = [bound.seconds.estimate for bound in llama.bounds]
    assert estimates == sorted(estimates, reverse=True)
    assert (llama.bounds[0].name, llama.bound_by) == ("overhead", "overhead")

    # Prompts: two FLOPs a parameter and token, four a pair of tokens and value of 32 heads of 128 in 32 layers; of the
    # head one row, so its bytes.
    def prompt_s(tokens: int) -> float:
        flops = 2 * tokens * (attention + ffn + norms) + 4 * 32 * 32 * 128 * tokens * (tokens + 1) / 2
        return flops / flops_per_s + tokens * 2 * 4096 / bytes_per_s

    prompt = llama.prompt
    assert prompt.ttft_s.limit == pytest.approx(prompt_s(8000) + 2 * table / bytes_per_s)
    assert prompt.prefill_tokens_per_s.limit == pytest.approx(8000 / prompt.ttft_s.limit)
    assert prompt.prefill_tokens_per_s.estimate == pytest.approx(8000 / prompt.ttft_s.estimate)
    assert prompt.ttft_s.estimate > 2 * prompt.ttft_s.limit
    # 16 chunks of 500 tokens: 32 x 211 µs each, and 2 ms of matrices.
    assert (prompt.limit_bound_by, prompt.bound_by) == ("compute: dense ffn", "overhead")
    # A hit saves what it would take as a prompt of its own, but for the head.
    assert {hit.hit_tokens: hit.saves_s.limit for hit in llama.prefix_hits} == pytest.approx(
        {2000: prompt_s(2000), 4000: prompt_s(4000), 7200: prompt_s(7200)}
    )


def test_what_bounds_a_part_is_said_of_the_estimate() -> None:
    # bf16 weights: a FLOP per byte and row. The chip does 312; at 32 % of its FLOP/s and 87 % of its bandwidth, 114.
    found = report(find_model("llama-3.1-8b"), find_slice("tpu7x-4"), replace(SETUP, num_requests=200))
    (ffn,) = (bound for bound in found.bounds if bound.name == "dense ffn")
    assert ffn.seconds.limit == pytest.approx(2 * 32 * 176_160_768 / (4 * 7.40e12))
    assert ffn.bound_by == "compute"


def test_a_prompt_may_go_through_fewer_parameters_than_its_answer() -> None:
    # V4.1-Flash: 8 B over a prompt, 16 B over the answer (its card).
    facts = model_facts(find_model("deepseek-v4.1-flash"))
    assert facts.num_params_active_prefill == pytest.approx(8e9, rel=0.05)
    assert facts.num_params_active_decode == pytest.approx(16e9, rel=0.05)


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


def words(text: str) -> list[str]:
    """Lines without the spaces that align them."""
    return [" ".join(line.split()) for line in text.splitlines()]


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
    *("fitted_generations[]", "fitted_num_chips[]", "fitted_min_requests", "fitted_max_requests", "warning"),
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


def test_the_text_has_every_figure_in_its_place(llama: Report) -> None:
    def decoding(batch: int, limit_s: float, estimate_s: float) -> Decoding:
        rates = (Both(limit=batch / part / limit_s, estimate=batch / part / estimate_s) for part in (1, batch, 4))
        tokens, user, chip = rates
        return Decoding(
            num_requests=batch,
            tpot_s=Both(limit=limit_s, estimate=estimate_s),
            tokens_per_s=tokens,
            tokens_per_s_per_user=user,
            tokens_per_s_per_chip=chip,
        )

    def bound(name: str, limit_s: float, estimate_s: float, by: str) -> Bound:
        shares = Both(limit=limit_s / 2e-3, estimate=estimate_s / 8e-3)
        seconds = Both(limit=limit_s, estimate=estimate_s)
        return Bound(name=name, num_bytes=3e9, num_flops=7e9, seconds=seconds, share_ratio=shares, bound_by=by)

    made = replace(
        llama,
        decoding=decoding(8, 2e-3, 8e-3),
        batches=(decoding(1, 1e-3, 5e-3), decoding(8, 2e-3, 8e-3)),
        prompt=Prompt(
            prompt_tokens=8000,
            ttft_s=Both(limit=0.5, estimate=5.0),
            prefill_tokens_per_s=Both(limit=16_000, estimate=1600),
            limit_bound_by="compute: dense ffn",
            bound_by="overhead",
        ),
        bounds=(bound("attention", 1.2e-3, 5e-3, "memory"), bound("head", 0.8e-3, 3e-3, "compute")),
        speculation=Speculation(
            num_draft_tokens=2,
            drafter="MTP",
            acceptance_length=2.5,
            round_s=Both(limit=4e-3, estimate=10e-3),
            break_even_length=Both(limit=2.0, estimate=1.25),
            tokens_per_s=Both(limit=5000, estimate=2001),
            speedup_ratio=Both(limit=1.26, estimate=2.01),
            tokens_per_s_by_draft=(
                Both(limit=4001, estimate=1001),
                Both(limit=4002, estimate=1002),
                Both(limit=4003, estimate=1003),
            ),
            best_num_draft_tokens=2,
        ),
        prefix_hits=(PrefixHit(hit_tokens=2000, saves_s=Both(limit=0.1, estimate=0.2)),),
    )
    said = words(as_text(made))
    for line in (
        "4 chips on 1 host (2x2x1, tpu7x-standard-4t): 825 GB HBM at 29.6 TB/s; FLOP/s: 9.23 P bf16, 18.5 P fp8",
        "MODEL 8.03 B parameters, 7.50 B active per token",
        "embedding 525 M 0 bf16 1.05 GB",
        "weights 16.1 GB 2.2%",
        "cache, 8 requests of 8,192 tokens 8.59 GB 1.2%",
        "step = time per output token 2.00 ms 8.00 ms 25%",
        "tokens/s per user 500 125 25%",
        "tokens/s per chip 1,000 250 25%",
        "tokens/s 4,000 1,000 25%",
        "time to first token, 8,000 tokens 500 ms 5.00 s 10%",
        "prefill tokens/s 16,000 1,600 10%",
        "The prompt: limit, in one step, bound by compute: dense ffn;",
        "estimate, in chunks of 512, by overhead.",
        "WHAT BOUNDS A STEP estimate: memory 62%, compute 38%",
        "attention 3.00 GB 7.00 G 1.20 ms 60.0% 5.00 ms 62.5% memory",
        "head 3.00 GB 7.00 G 800 µs 40.0% 3.00 ms 37.5% compute",
        "1 1.00 ms 5.00 ms 1,000 200 250 50.0",
        "8 2.00 ms 8.00 ms 500 125 1,000 250",
        "SPECULATION 2 tokens drafted by MTP, 8 requests",
        "round 4.00 ms 10.0 ms",
        "breaks even at acceptance length 2.00 1.25",
        "tokens/s at length 2.50 5,000 2,001",
        "times plain decoding 1.26 2.01",
        "drafted tokens 0 1 2",
        "tokens/s, limit 4,001 4,002 4,003",
        "tokens/s, estimate 1,001 1,002 1,003",
        "Best: 2 drafted tokens.",
        "2,000 of 8,000 tokens 100 ms 200 ms",
    ):
        assert line in said


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


@pytest.mark.parametrize("placement", list(Placement))
def test_a_row_of_a_comparison_is_what_the_report_says(placement: Placement) -> None:
    spec, setup = find_model("qwen3.8-27b"), replace(SETUP, num_requests=100, chunk_tokens=512, placement=placement)
    rows = compare(spec, setup)
    assert {row.decoding is None for row in rows} == {True, False}
    for row in rows:
        where = find_slice(row.slice_name)
        assert (row.num_chips, row.num_hosts) == (where.num_chips, where.num_hosts)
        if row.decoding is None:
            with pytest.raises(DoesNotFit, match=f"{row.missing_bytes:.0f} bytes too many"):
                report(spec, where, setup)
            continue
        found = report(spec, where, setup)
        assert row.missing_bytes == 0
        assert (row.max_requests, row.decoding, row.prompt) == (found.fit.max_requests, found.decoding, found.prompt)
        assert row.largest == found.batches[-1]


def test_a_line_of_a_comparison_is_of_the_batch_asked_for_and_per_chip_of_the_largest(llama: Report) -> None:
    def decoding(batch: int, tpot_s: float, per_chip: float) -> Decoding:
        return replace(
            llama.decoding,
            num_requests=batch,
            tpot_s=Both(limit=tpot_s, estimate=2 * tpot_s),
            tokens_per_s_per_chip=Both(limit=per_chip, estimate=per_chip / 2),
        )

    fits = Row(
        slice_name="v6e-4",
        num_chips=4,
        num_hosts=1,
        missing_bytes=0,
        max_requests=1234,
        decoding=decoding(1, 0.002, 77),
        largest=decoding(1234, 0.5, 888),
        prompt=replace(llama.prompt, ttft_s=Both(limit=0.3, estimate=6.0)),
    )
    lacks = replace(fits, slice_name="v6e-1", missing_bytes=4.5e9, max_requests=0, decoding=None, largest=None)
    assert words(comparison_text("llama-3.1-8b", SETUP, [fits, lacks]))[-2:] == [
        "v6e-4 1,234 2.00 ms 4.00 ms 888 444 300 ms 6.00 s",
        "v6e-1 0 lacks 4.50 GB",
    ]


def test_the_check_shows_every_point_with_its_use_and_its_source() -> None:
    rows = residuals()
    fitted = [row for row in rows if row.point.use is Use.FITTED]
    # Made up: 101 %, 102 %, … of what was published.
    unseen = [replace(row, estimate=row.point.value * (1 + at / 100)) for at, row in enumerate(fitted, 1)]
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
            assert f" {three(row.limit or 0)} " in line
            assert f" {three(row.estimate or 0)} " in line
        (mark,) = re.findall(rf"(\[\d+\]) {re.escape(point.source)}$", text, re.MULTILINE)
        assert line.endswith(f" {mark}")
        if point.use is Use.FITTED:
            assert f" +{fitted.index(row) + 1}% " in line
    assert max(map(len, lines)) <= 130
    assert all(f"{one.dense_bandwidth_ratio:.0%}" in text for one in FACTORS.values())


def test_the_check_sums_up_the_sizes_of_errors_of_what_was_held_out() -> None:
    (held,) = (row for row in residuals() if row.point.name == "Kimi K3, batch 2")

    def published(value: float, estimate: float, use: Use = Use.HELD_OUT) -> Residual:
        return Residual(point=replace(held.point, value=value, use=use), limit=1000.0, estimate=estimate)

    # +20 %, -50 %, +10 %; and a fitted point that does not count.
    rows = [published(200, 240), published(100, 50), published(400, 440), published(100, 900, Use.FITTED)]
    counted = "3 points, median error 20%, worst 50%.\n"
    assert f"  Held out of the fit, and following from no fitted one: {counted}" in check_text(rows, [], {})


def test_an_estimate_says_when_its_factors_are_from_another_generation() -> None:
    spec = find_model("llama-3.1-8b")
    carried = "Nothing published for v5p: factors are carried over from v6e."
    assert carried in as_text(report(spec, find_slice("v5p-8"), SETUP))
    fused = as_text(report(spec, find_slice("v6e-4"), replace(SETUP, engine=Engine.FUSED)))
    assert "Nothing published for v6e: factors are carried over from tpu7x." in fused
    assert "carried over" not in as_text(report(spec, find_slice("v6e-4"), SETUP))
    assert "carried over" not in as_text(report(spec, find_slice("tpu7x-4"), SETUP))


def test_both_placements_have_their_largest_batch(k3: Report) -> None:
    spec, where = find_model("kimi-k3"), find_slice("tpu7x-16")
    setup = replace(k3.setup, placement=Placement.TENSOR_PARALLEL)
    other = report(spec, where, setup).fit
    assert other.max_requests_by_placement == k3.fit.max_requests_by_placement
    assert k3.fit.max_requests_by_placement["spread"] == k3.fit.max_requests > other.max_requests
    assert other.max_requests_by_placement["tensor-parallel"] == other.max_requests


def test_copies_of_a_cache_take_time() -> None:
    # One KV head on 32 devices, and chunks so small that memory bounds attention.
    spec, where, setup = find_model("gemma-3-270m"), find_slice("tpu7x-16"), replace(SETUP, chunk_tokens=16)
    once, copied = (report(spec, where, replace(setup, placement=placement)) for placement in Placement)
    assert copied.decoding.tpot_s.limit > once.decoding.tpot_s.limit
    assert copied.prompt.ttft_s.estimate > once.prompt.ttft_s.estimate
    assert copied.prefix_hits[0].saves_s.estimate > once.prefix_hits[0].saves_s.estimate


def test_an_estimate_warns_beyond_the_slices_and_batches_it_was_fitted_on() -> None:
    spec = find_model("kimi-k3")
    inside = report(spec, find_slice("tpu7x-16"), replace(SETUP, engine=Engine.FUSED))
    assert inside.fitted_num_chips == (4, 16)
    assert "Warning" not in as_text(inside)
    many = inside.fitted_max_requests + 1
    outside = as_text(report(spec, find_slice("tpu7x-16"), replace(SETUP, engine=Engine.FUSED, num_requests=many)))
    assert "Warning: factors fitted on 4-chip and 16-chip slices, batch 1 to 8; the estimate reaches beyond." in outside
    serving = as_text(report(spec, find_slice("tpu7x-16"), SETUP))
    assert "Warning: factors fitted on 4-chip slices, batch 4 to 256; the estimate reaches beyond." in serving


def test_active_parameters_are_told_as_announced_too() -> None:
    flash = report(find_model("deepseek-v4-flash"), find_slice("tpu7x-16"), SETUP)
    assert flash.model.num_params_active_with_embedding == pytest.approx(13.9e9, rel=0.02)
    assert "as its makers count, with the embedding" in as_text(flash)


def test_the_list_says_what_a_model_is() -> None:
    text = list_text([model_facts(find_model("llama-3.1-8b"))], [slice_facts(find_slice("v6e-4"))])
    # 8.03 B parameters of two bytes, 525 M of them looked up; 8 heads of 128, twice, in 32 layers, of two bytes.
    assert words(text)[1:] == ["llama-3.1-8b 8.03 B 7.50 B 16.1 GB 131 KB - 131,072 -", "", "v6e-4"]
    # 13.90 B active with the embedding (yzlnew/infra-skills), 530 M of which are the embedding.
    flash = words(list_text([model_facts(find_model("deepseek-v4-flash"))], []))[1].split()
    assert float(flash[3]) == pytest.approx(13.9, abs=0.2)


def test_a_ladder_of_batches_doubles_up_to_the_largest() -> None:
    assert batch_ladder(1) == (1,)
    assert batch_ladder(8) == (1, 2, 4, 8)
    assert batch_ladder(10) == (1, 2, 4, 8, 10)


def test_values_are_short_and_have_units() -> None:
    assert (count(2.779e12), count(134.5e6), size(1.5622e12), size(880.0)) == ("2.78 T", "134 M", "1.56 TB", "880 B")
    assert (duration(1.163e-3), duration(2.0), duration(12.34e-6)) == ("1.16 ms", "2.00 s", "12.3 µs")
    assert table([("a", "bb"), ("ccc", "d")]) == ["  a    bb", "  ccc   d"]
    # At the edges of units.
    assert [count(value) for value in (999, 1e3, 1e6, 1e9, 1e12)] == ["999", "1.00 K", "1.00 M", "1.00 B", "1.00 T"]
    assert [size(value) for value in (0, 999, 1e3, 1e12, -2e9)] == ["0 B", "999 B", "1.00 KB", "1.00 TB", "-2.00 GB"]
    assert scaled(1e15, FLOP_SCALES) == "1.00 P"
    assert [duration(value) for value in (0.999e-3, 1e-3, 0.999, 1.0)] == ["999 µs", "1.00 ms", "999 ms", "1.00 s"]
    assert [three(value) for value in (9.99, 10, 99.9, 100, 1234)] == ["9.99", "10.0", "99.9", "100", "1,234"]
    rates = [per_time(value) for value in (2, 1, 0.5, 1 / 60, 0.01, 10 / 3600)]
    assert rates == ["2.00/s", "1.00/s", "30.0/min", "1.00/min", "36.0/h", "10.0/h"]


def test_an_unknown_name_says_the_nearest_if_one_is_near() -> None:
    assert unknown("model", "KIMI-K33", ["qwen", "kimi-k3"]) == "model 'KIMI-K33' is not known (nearest: kimi-k3)"
    assert unknown("model", "zork", ["qwen", "kimi-k3"]) == "model 'zork' is not known"
    assert unknown("slice", "x" * 100, ["v6e-1"]) == f"slice {'x' * 64!r} is not known"


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
    origin = "Estimate: serving, fitted on v6e (4 and 16 chips, batch 8 to 256), tpu7x (4 chips, batch 4 to 256);"
    assert f"{origin} elsewhere carried over from v6e." in text
    assert "0.00" not in text
