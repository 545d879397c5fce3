"""The limit of a step: bytes and FLOPs by part, U(n), and the published figures for Kimi K3."""

from operator import attrgetter

import pytest

from ostrya.capacity.chips import Dtype, find_slice
from ostrya.capacity.costs import Work, costs, expected_distinct_experts
from ostrya.capacity.estimate import FACTORS
from ostrya.capacity.facts import Setup
from ostrya.capacity.figures import Asked
from ostrya.capacity.layers import Part, Phase
from ostrya.capacity.memory import CHUNK_TOKENS, Placement
from ostrya.capacity.models import find_model
from ostrya.capacity.published import Engine
from ostrya.capacity.serving import Serving, prefill, prefix_hit_saves_s, serving
from ostrya.capacity.spec import FP8, INT8, with_kv, with_weights
from ostrya.capacity.speculation import PLAIN, Drafting, round_time
from ostrya.capacity.step import PEAK, Efficiency, mixed_step_time, step_time
from ostrya.errors import ConfigError

K3, SIXTEEN = find_model("kimi-k3"), find_slice("tpu7x-16")
ONE = Work(num_requests=1)


def test_distinct_experts_follow_the_formula() -> None:
    for num_tokens, expected in ((1, 16), (8, 120), (32, 393), (128, 807)):
        assert expected_distinct_experts(896, 16, num_tokens) == pytest.approx(expected, abs=1)
    assert expected_distinct_experts(8, 8, 3) == 8
    assert expected_distinct_experts(128, 8, 0) == 0


def test_kimi_k3s_step_on_sixteen_chips_takes_at_least_1_16_ms() -> None:
    step = step_time(K3, SIXTEEN, ONE)
    # The two derivations that this must reproduce are of weights alone: 1.14 to 1.16 ms, 862 to 874 tok/s.
    weights_s = sum(part.seconds for part in step.parts if part.part not in {Part.STATE, Part.CACHE})
    assert 1.14e-3 <= weights_s <= 1.16e-3
    assert 862 <= 1 / weights_s <= 874
    # They leave the recurrent state out (0.87 GB read and written), which is 0.6 %.
    assert step.seconds == pytest.approx(1.1641e-3, rel=1e-4)


@pytest.mark.parametrize(("rows", "gigabytes"), [(1, 136.9), (8, 305), (32, 745), (128, 1414)])
def test_kimi_k3_reads_the_bytes_derived_for_n_tokens(rows: int, gigabytes: float) -> None:
    parts = costs(K3, [Work(num_requests=rows)])
    read = sum(part.num_bytes for part in parts if part.part not in {Part.STATE, Part.CACHE})
    assert read == pytest.approx(gigabytes * 1e9, rel=0.005)


def test_fp8_weights_halve_the_trunk() -> None:
    parts = costs(with_weights(K3, FP8), [ONE])
    read = sum(part.num_bytes for part in parts if part.part not in {Part.STATE, Part.CACHE})
    # The derivation's 80.7 GB have head and routers narrowed too, which quantized checkpoints do not.
    assert read == pytest.approx(80.7e9 + 163840 * 7168 + 92 * 896 * 7168, rel=0.01)


@pytest.mark.parametrize(("slice_name", "tokens_per_s"), [("tpu7x-1", 144), ("tpu7x-4", 577), ("v6e-4", 128)])
def test_qwen3_8_27bs_ceiling_is_as_derived(slice_name: str, tokens_per_s: float) -> None:
    step = step_time(find_model("qwen3.8-27b"), find_slice(slice_name), ONE)
    assert 1 / step.seconds == pytest.approx(tokens_per_s, rel=0.02)


def test_decoding_one_request_is_bound_by_memory_and_a_prompt_by_the_matrix_unit() -> None:
    dense = find_model("llama-3.1-8b")
    where = find_slice("v6e-1")
    assert step_time(dense, where, ONE).bound_by.startswith("memory: ")
    chunk = Work(num_requests=1, rows_per_request=4096, phase=Phase.PREFILL)
    assert step_time(dense, where, chunk).bound_by.startswith("compute: ")


def test_compute_is_two_flops_per_active_parameter_and_token() -> None:
    spec = find_model("llama-3.1-8b")
    flops = sum(part.num_flops for part in costs(spec, [Work(num_requests=64)]) if part.part is not Part.CACHE)
    assert flops == pytest.approx(2 * 7.505e9 * 64, rel=0.001)


def test_a_prompt_goes_through_the_head_once() -> None:
    spec = find_model("llama-3.1-8b")
    head = {
        work.phase: part.num_flops
        for work in (
            Work(num_requests=1, rows_per_request=512, phase=Phase.PREFILL),
            Work(num_requests=1, rows_per_request=512, phase=Phase.DECODE),
        )
        for part in costs(spec, [work])
        if part.part is Part.HEAD
    }
    assert head[Phase.DECODE] == 512 * head[Phase.PREFILL]


V41_EXPERT = 3 * 5120 * 2304
V41_DECODE = Work(num_requests=3, context_tokens=100_000)
V41_CHUNK = Work(num_requests=1, rows_per_request=64, context_tokens=50_000, phase=Phase.PREFILL)


@pytest.mark.parametrize(
    ("works", "prompt_rows", "answer_rows", "num_logits"),
    [
        pytest.param((V41_DECODE,), 3, 3, 3, id="decoding"),
        pytest.param((V41_CHUNK,), 64, 0, 1, id="prompt"),
        pytest.param((V41_DECODE, V41_CHUNK), 67, 3, 3 + 1, id="mixed"),
    ],
)
def test_deepseek_v4_1_reads_half_its_layers_over_a_prompt(
    works: tuple[Work, ...], prompt_rows: int, answer_rows: int, num_logits: int
) -> None:
    """By hand; 20 layers run over prompt and answer, 20 over the answer alone. Bytes, then FLOPs."""
    layers = 20 + 20 * (answer_rows > 0)
    row_layers = 20 * (prompt_rows + answer_rows)
    drawn = 20 * 384 * (1 - (378 / 384) ** prompt_rows) + 20 * 384 * (1 - (378 / 384) ** answer_rows)
    expected = {
        Part.EMBEDDING: (prompt_rows * 5120 * 2, 0),
        Part.HEAD: (129280 * 5120 * 2, 2 * 129280 * 5120 * num_logits),
        Part.ROUTED_EXPERTS: (drawn * V41_EXPERT * 4.25 / 8, 2 * 6 * V41_EXPERT * row_layers),
        Part.SHARED_EXPERTS: (layers * V41_EXPERT, 2 * V41_EXPERT * row_layers),
        # Two tables, 24 rows of 256 of each, FP8; looked up, not multiplied.
        Part.TABLES: (prompt_rows * 2 * 24 * 256, 0),
    }
    found = {part.part: (part.num_bytes, part.num_flops) for part in costs(find_model("deepseek-v4.1-flash"), works)}
    assert {part: found[part] for part in expected} == {part: pytest.approx(both) for part, both in expected.items()}
    # Two norms of a layer, and two mixing matrices of 4 streams into 24; and the last norm.
    assert found[Part.NORMS][0] == (layers * (2 + 2 * 24) + 1) * 5120 * 2


def test_every_part_is_multiplied_as_it_is_stored() -> None:
    found = {part.part: part.dtype for part in costs(K3, [Work(num_requests=1, context_tokens=1000)])}
    assert {part for part, dtype in found.items() if dtype is Dtype.FP8} == {Part.ROUTED_EXPERTS, Part.CACHE}
    assert {dtype for part, dtype in found.items() if part not in {Part.ROUTED_EXPERTS, Part.CACHE}} == {Dtype.BF16}
    narrowed = costs(with_kv(K3, INT8), [Work(num_requests=1, context_tokens=1000)])
    assert next(part.dtype for part in narrowed if part.part is Part.CACHE) is Dtype.INT8
    # A float32 state beside FP8 weights.
    hybrid = costs(find_model("qwen3.5-397b-a17b"), [ONE])
    assert next(part.dtype for part in hybrid if part.part is Part.STATE) is Dtype.BF16


def test_a_part_takes_its_bytes_or_its_flops_at_the_share_of_the_peaks_that_is_reached() -> None:
    efficiency = Efficiency(
        name="halves",
        dense_bandwidth_ratio=1 / 2,
        expert_bandwidth_ratio=1 / 4,
        cache_bandwidth_ratio=1 / 3,
        flops_ratio=1 / 8,
        exposed_ici_ratio=1 / 16,
        layer_overhead_s=1e-3,
    )
    spec, where = find_model("deepseek-v4.1-flash"), find_slice("tpu7x-4")
    step = mixed_step_time(spec, where, V41_DECODE, V41_CHUNK, efficiency=efficiency)
    for part in step.parts:
        share = {Part.ROUTED_EXPERTS: 1 / 4, Part.CACHE: 1 / 3}.get(part.part, 1 / 2)
        assert part.memory_s == pytest.approx(part.num_bytes / (4 * 7.40e12 * share))
        # bf16 as released; its fp4 cache is widened to that. All else is FP8, or FP4 taken as FP8.
        wide = part.part in {Part.EMBEDDING, Part.HEAD, Part.NORMS, Part.ROUTER, Part.CACHE}
        assert part.compute_s == pytest.approx(part.num_flops / (4 * (2307e12 if wide else 4614e12) / 8))
        assert part.seconds == max(part.memory_s, part.compute_s)
    # Two ring all-reduces of bf16 vectors after each of 20 layers for 64 rows and of 40 for 3, over 600 GB/s each way.
    assert step.collectives_s == pytest.approx(2 * (3 / 4) * (64 * 20 + 3 * 40) * 2 * 5120 * 2 / 600e9)
    assert step.seconds == pytest.approx(sum(part.seconds for part in step.parts) + step.collectives_s / 16 + 40e-3)
    state = next(part for part in step_time(K3, where, ONE, efficiency=efficiency).parts if part.part is Part.STATE)
    assert state.memory_s == pytest.approx(state.num_bytes / (4 * 7.40e12 / 3))
    prompt = step_time(spec, where, V41_CHUNK, efficiency=efficiency)
    assert prompt.overhead_s == pytest.approx(20e-3)
    assert prompt.collectives_s == pytest.approx(2 * (3 / 4) * 64 * 20 * 2 * 5120 * 2 / 600e9)


def test_a_cache_is_read_once_per_request_and_copies_once_per_device() -> None:
    spec = find_model("llama-3.1-8b")

    def cache(work: Work, **where: int | Placement) -> float:
        parts = costs(spec, [work], **where)  # type: ignore[arg-type]
        return next(part.num_bytes for part in parts if part.part is Part.CACHE)

    one = cache(Work(num_requests=1, context_tokens=1000))
    assert one == 1001 * 32 * 2 * 8 * 128 * 2
    assert cache(Work(num_requests=4, context_tokens=1000)) == 4 * one
    copied = cache(Work(num_requests=1, context_tokens=1000), num_devices=16, placement=Placement.TENSOR_PARALLEL)
    assert copied == 2 * one
    # On fewer devices than KV heads there is nothing to copy, and nothing less than one.
    shared = cache(Work(num_requests=1, context_tokens=1000), num_devices=4, placement=Placement.TENSOR_PARALLEL)
    assert shared == one


def test_a_verification_writes_the_state_once_per_row() -> None:
    rows = Work(num_requests=3, rows_per_request=8)
    prompt = Work(num_requests=1, rows_per_request=8, phase=Phase.PREFILL)
    one, verified, read = (
        next(part for part in costs(K3, [work]) if part.part is Part.STATE) for work in (ONE, rows, prompt)
    )
    # 69 layers of 96 heads of 128 x 128, float32: read once, and written once for each row that may be the last.
    values = 69 * 96 * 128 * 128
    assert (one.num_bytes, one.num_flops) == (2 * values * 4, 7 * values)
    assert (verified.num_bytes, verified.num_flops) == (3 * 9 * values * 4, 3 * 8 * 7 * values)
    # A prompt is never taken back.
    assert (read.num_bytes, read.num_flops) == (2 * values * 4, 8 * 7 * values)


def test_deepseek_v4_1_reads_a_prompt_in_half_the_flops() -> None:
    spec = find_model("deepseek-v4.1-flash")
    flops = {
        phase: sum(
            part.num_flops
            for part in costs(spec, [Work(num_requests=1, rows_per_request=64, phase=phase)])
            if part.part not in {Part.CACHE, Part.HEAD}
        )
        for phase in Phase
    }
    assert flops[Phase.PREFILL] == pytest.approx(flops[Phase.DECODE] / 2, rel=0.01)


def test_the_curve_trades_latency_for_throughput() -> None:
    setup = Setup(context_tokens=1000, num_requests=1, prompt_tokens=1, engine=Engine.SERVING)
    curve = [Asked(spec=K3, where=SIXTEEN, setup=setup).decoding(batch) for batch in (1, 2, 4, 8, 64)]
    for which in (attrgetter("limit"), attrgetter("estimate")):
        times, rates = [which(one.tpot_s) for one in curve], [which(one.tokens_per_s) for one in curve]
        assert times == sorted(times)
        assert rates == sorted(rates)
        last = curve[-1]
        assert which(last.tokens_per_s_per_chip) == pytest.approx(64 * which(last.tokens_per_s_per_user) / 16)


def test_a_prompt_in_chunks_takes_at_least_as_long_as_in_one() -> None:
    spec, where = find_model("qwen3-8b"), find_slice("v6e-4")
    whole, chunked = (prefill(spec, where, 8000, chunk_tokens=chunk) for chunk in (8000, 512))
    assert (len(whole.steps), len(chunked.steps)) == (1, 16)
    assert chunked.seconds >= whole.seconds


def test_a_chunk_beside_decoding_costs_less_than_both_apart() -> None:
    spec, where = find_model("qwen3-8b"), find_slice("v6e-4")
    decode = Work(num_requests=16, context_tokens=2000)
    chunk = Work(num_requests=1, rows_per_request=512, context_tokens=0, phase=Phase.PREFILL)
    together = mixed_step_time(spec, where, decode, chunk).seconds
    apart = step_time(spec, where, decode).seconds + step_time(spec, where, chunk).seconds
    assert max(step_time(spec, where, decode).seconds, step_time(spec, where, chunk).seconds) < together < apart


def test_a_prefix_hit_saves_its_share_and_never_all() -> None:
    spec, where = find_model("llama-3.1-70b"), find_slice("v6e-8")
    cold = prefill(spec, where, 8000).seconds
    saved = [prefix_hit_saves_s(spec, where, 8000, hit) for hit in (0, 2000, 4000, 8000)]
    assert saved == sorted(saved)
    assert saved[0] == 0
    # Later tokens see more context, so the first half of a prompt is a little less than half the work.
    assert 0.4 * cold < saved[2] < 0.5 * cold
    assert saved[3] < cold
    assert prefill(spec, where, 8000, cached_tokens=8000).num_tokens == 1


def test_a_load_with_hits_is_faster_than_one_without() -> None:
    spec, where = find_model("qwen3-30b-a3b"), find_slice("v6e-8")
    cold, warm = (
        serving(spec, where, num_requests=32, prompt_tokens=8000, output_tokens=500, hit_ratio=hit)
        for hit in (0.0, 0.5)
    )
    assert warm.ttft_s < cold.ttft_s
    assert warm.tpot_s < cold.tpot_s
    assert warm.output_tokens_per_s > cold.output_tokens_per_s
    assert cold.requests_per_s * 500 == pytest.approx(cold.output_tokens_per_s)


def test_links_count_in_an_estimate_and_not_at_the_limit() -> None:
    spec, where = find_model("llama-3.1-8b"), find_slice("v5e-8")
    chunk = Work(num_requests=1, rows_per_request=4096, phase=Phase.PREFILL)
    limit = step_time(spec, where, chunk)
    assert limit.seconds == sum(part.seconds for part in limit.parts)
    assert limit.collectives_s > limit.exposed_s == 0
    exposed = step_time(spec, where, chunk, efficiency=Efficiency(name="exposed", exposed_ici_ratio=1.0))
    assert exposed.seconds == pytest.approx(limit.collectives_s + sum(part.seconds for part in limit.parts))


@pytest.mark.parametrize(
    ("requests", "rows", "context", "message"),
    [
        (0, 1, 0, "number of requests is 0"),
        (-3, 1, 0, "number of requests is -3"),
        (1, 0, 0, "tokens per request and step are 0"),
        (1, float("nan"), 0, "tokens per request and step are nan"),
        (1, 1, -1, "context is -1 tokens"),
        (1, 1, float("inf"), "context is inf tokens"),
    ],
)
def test_absurd_work_is_refused(requests: int, rows: float, context: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Work(num_requests=requests, rows_per_request=rows, context_tokens=context)


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"context is 50,000 tokens and 1 of the step; .* is 40,960"):
        step_time(find_model("qwen3-8b"), find_slice("v6e-4"), Work(num_requests=1, context_tokens=50_000))


@pytest.mark.parametrize(
    ("prompt", "cached", "chunk", "message"),
    [
        (0, 0, 512, "prompt is 0 tokens"),
        (10, 11, 512, "prefix hit is 11 tokens"),
        (10, -1, 512, "prefix hit is -1 tokens"),
        (10, 0, 0, "chunk is 0 tokens"),
    ],
)
def test_absurd_prompts_are_refused(prompt: int, cached: int, chunk: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prefill(find_model("qwen3-8b"), find_slice("v6e-4"), prompt, cached_tokens=cached, chunk_tokens=chunk)


@pytest.mark.parametrize(("output", "hit", "message"), [(0, 0.0, "output is 0"), (1, 1.5, "hit ratio is 1.5")])
def test_absurd_loads_are_refused(output: int, hit: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serving(
            find_model("qwen3-8b"),
            find_slice("v6e-4"),
            num_requests=1,
            prompt_tokens=10,
            output_tokens=output,
            hit_ratio=hit,
        )


def test_a_load_that_is_longer_than_the_model_allows_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="prompt of 40960 and output of 1 tokens are longer than the 40960 of qwen3-8b"
    ):
        serving(find_model("qwen3-8b"), find_slice("v6e-4"), num_requests=1, prompt_tokens=40960, output_tokens=1)


def test_prompts_wait_in_line_once_their_chunks_are_more_than_the_steps() -> None:
    spec, where = find_model("qwen3-8b"), find_slice("v6e-4")
    easy, full, over = (
        serving(spec, where, num_requests=batch, prompt_tokens=8192, output_tokens=256) for batch in (8, 64, 256)
    )
    assert easy.wait_s == full.wait_s == 0 < over.wait_s
    assert over.requests_per_s == pytest.approx(full.requests_per_s, rel=0.02)
    # Little's law: as many are in the system as there are requests.
    assert over.requests_per_s * (over.wait_s + over.ttft_s + 255 * over.tpot_s) == pytest.approx(256)


def test_more_experts_per_token_than_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot draw 9 of 8 experts"):
        expected_distinct_experts(8, 9, 1)


@pytest.mark.parametrize("name", ["qwen3-8b", "kimi-k3"])
@pytest.mark.parametrize("efficiency", [PEAK, *FACTORS.values()])
def test_a_request_alone_decodes_undisturbed_by_its_own_prompt(name: str, efficiency: Efficiency) -> None:
    spec, where = find_model(name), SIXTEEN
    load = serving(spec, where, num_requests=1, prompt_tokens=8192, output_tokens=256, efficiency=efficiency)
    alone = step_time(spec, where, Work(num_requests=1, context_tokens=8192 + 128), efficiency=efficiency)
    assert load.tpot_s == alone.seconds
    # Chunks of equal size at their mean context, against each at its own.
    prompt = prefill(spec, where, 8192, efficiency=efficiency)
    assert len(prompt.steps) == 8192 // CHUNK_TOKENS
    assert load.ttft_s == pytest.approx(prompt.seconds)
    assert load.wait_s == pytest.approx(0, abs=1e-9)


def test_a_drafted_load_decodes_in_rounds() -> None:
    spec, where, efficiency = find_model("qwen3.8-27b"), find_slice("tpu7x-4"), FACTORS[Engine.SERVING, "tpu7x"]
    drafting = Drafting(num_draft_tokens=5, acceptance_length=3.0)

    def load(num_requests: int, how: Drafting) -> Serving:
        return serving(
            spec,
            where,
            num_requests=num_requests,
            prompt_tokens=8192,
            output_tokens=601,
            drafting=how,
            efficiency=efficiency,
        )

    round_ = round_time(spec, where, num_draft_tokens=5, context_tokens=8192 + 300.5, efficiency=efficiency)
    assert load(1, drafting).tpot_s == pytest.approx(round_.seconds / 3)
    assert load(1, drafting).ttft_s == load(1, PLAIN).ttft_s
    # Four requests: a fifth of a request's 200 rounds, more or less, carry a chunk of the three others' four.
    batch = load(4, drafting)
    chunk = Work(num_requests=1, rows_per_request=2048, context_tokens=3072, phase=Phase.PREFILL)
    verify = Work(num_requests=3, rows_per_request=6, context_tokens=8192 + 300.5)
    mixed = mixed_step_time(spec, where, verify, chunk, efficiency=efficiency)
    three, four = (
        round_time(
            spec, where, num_draft_tokens=5, num_requests=count, context_tokens=8192 + 300.5, efficiency=efficiency
        )
        for count in (3, 4)
    )
    mixed_s = mixed.seconds + three.draft_s
    share = 3 * 4 / (601 / 3)
    assert batch.tpot_s == pytest.approx((share * mixed_s + (1 - share) * four.seconds) / 3)
    assert batch.ttft_s == pytest.approx(4 * mixed_s)
    assert batch.requests_per_s == pytest.approx(4 / (4 * mixed_s + 600 * batch.tpot_s))


def test_drafting_nothing_is_decoding_plainly() -> None:
    spec, where = find_model("kimi-k3"), find_slice("tpu7x-16")
    nothing = Drafting(num_draft_tokens=0, acceptance_length=1.0)
    for batch in (1, 8, 200):
        plain, same = (
            serving(spec, where, num_requests=batch, prompt_tokens=4096, output_tokens=256, drafting=one)
            for one in (PLAIN, nothing)
        )
        assert plain == same


def test_a_request_at_the_models_limit_may_draft() -> None:
    spec = find_model("qwen3-8b")
    drafting = Drafting(num_draft_tokens=7, acceptance_length=2.0)
    load = serving(spec, find_slice("v6e-4"), num_requests=2, prompt_tokens=40950, output_tokens=10, drafting=drafting)
    assert load.tpot_s > 0
