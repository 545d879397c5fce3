"""What a request keeps, what fits, and what a model that does not fit is told."""

import pytest

from ostrya.capacity.chips import find_slice
from ostrya.capacity.costs import Work, costs
from ostrya.capacity.layers import Part
from ostrya.capacity.memory import DoesNotFit, Placement, fit, kv_bytes, kv_bytes_per_token, require_fit, state_bytes
from ostrya.capacity.models import find_model
from ostrya.errors import ConfigError


def test_kimi_k3_keeps_434_mb_of_state_and_13_8_kb_per_token() -> None:
    spec = find_model("kimi-k3")
    assert state_bytes(spec) == 69 * 96 * 128 * 128 * 4
    assert state_bytes(spec) == pytest.approx(434e6, rel=0.001)
    assert kv_bytes_per_token(spec) == 576 * 24
    assert kv_bytes_per_token(spec) == pytest.approx(13.8e3, rel=0.002)


def test_qwen3_8_27b_keeps_151_mb_of_state_and_64_kib_per_token() -> None:
    spec = find_model("qwen3.8-27b")
    assert state_bytes(spec) == pytest.approx(151e6, rel=0.001)
    assert kv_bytes_per_token(spec) == 64 * 1024


def test_deepseek_v4_1_keeps_the_890_bytes_per_token_of_its_card() -> None:
    assert kv_bytes_per_token(find_model("deepseek-v4.1-flash")) == pytest.approx(890, rel=0.001)


def test_attention_without_recurrence_keeps_no_state() -> None:
    assert state_bytes(find_model("llama-3.1-8b")) == 0


def test_windows_stop_growing() -> None:
    spec = find_model("gpt-oss-120b")
    # Half of 36 layers see 128 tokens.
    per_layer = 2 * 8 * 64 * 2
    assert kv_bytes(spec, 100) == 36 * 100 * per_layer
    assert kv_bytes(spec, 1128) == (18 * 1128 + 18 * 128) * per_layer
    assert kv_bytes_per_token(spec) == 18 * per_layer


def test_tensor_parallelism_copies_what_it_cannot_cut() -> None:
    where = find_slice("tpu7x-16")
    placement = Placement.TENSOR_PARALLEL
    mla = find_model("kimi-k3")
    assert kv_bytes(mla, 1000, num_devices=where.num_devices, placement=placement) == 32 * kv_bytes(mla, 1000)
    grouped = find_model("llama-3.1-8b")
    assert kv_bytes(grouped, 1000, num_devices=8, placement=placement) == kv_bytes(grouped, 1000)
    assert kv_bytes(grouped, 1000, num_devices=32, placement=placement) == 4 * kv_bytes(grouped, 1000)


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("name", ["kimi-k3", "qwen3.8-27b", "qwen3.5-397b-a17b"])
def test_a_decoded_token_reads_and_writes_the_state_that_is_kept(name: str, placement: Placement) -> None:
    # On 256 devices every one of these copies its state where heads are cut.
    spec, where = find_model(name), find_slice("tpu7x-128")
    kept = fit(spec, where, context_tokens=0, placement=placement).state_bytes_per_request
    parts = costs(spec, [Work(num_requests=1)], num_devices=where.num_devices, placement=placement)
    assert next(part.num_bytes for part in parts if part.part is Part.STATE) == pytest.approx(2 * kept)
    assert (kept > state_bytes(spec)) == (placement is Placement.TENSOR_PARALLEL)


def test_kimi_k3_fits_on_sixteen_chips() -> None:
    found = fit(find_model("kimi-k3"), find_slice("tpu7x-16"), context_tokens=8192, num_requests=8)
    assert found.fits
    assert found.weights_bytes / 16 == pytest.approx(97.5e9, rel=0.01)
    assert found.max_requests > 1000
    assert found.max_context_tokens == 1_048_576


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    spec, where = find_model("llama-3.1-8b"), find_slice("v6e-1")
    largest = fit(spec, where, context_tokens=4096).max_requests
    assert fit(spec, where, context_tokens=4096, num_requests=largest).fits
    assert not fit(spec, where, context_tokens=4096, num_requests=largest + 1).fits


def test_the_longest_context_fits_and_one_more_token_does_not() -> None:
    spec, where = find_model("llama-3.1-8b"), find_slice("v6e-1")
    longest = fit(spec, where, context_tokens=1, num_requests=8).max_context_tokens
    assert 0 < longest < spec.max_context_tokens
    assert fit(spec, where, context_tokens=longest, num_requests=8).fits
    assert not fit(spec, where, context_tokens=longest + 1, num_requests=8).fits


def test_speculation_needs_room_for_its_drafter_and_checkpoints() -> None:
    spec, where = find_model("kimi-k3"), find_slice("tpu7x-16")
    plain = fit(spec, where, context_tokens=1000)
    drafting = fit(spec, where, context_tokens=1000, num_draft_tokens=7)
    assert drafting.state_bytes_per_request == 8 * plain.state_bytes_per_request
    assert drafting.drafter_bytes > plain.drafter_bytes == 0
    assert drafting.max_requests < plain.max_requests


def test_a_model_that_does_not_fit_says_by_how_much_and_where_it_would() -> None:
    spec = find_model("kimi-k3")
    missing = -fit(spec, find_slice("tpu7x-8"), context_tokens=8192).free_bytes
    with pytest.raises(DoesNotFit, match=rf"{missing:.0f} bytes too many; tpu7x-16 would do"):
        require_fit(spec, find_slice("tpu7x-8"), context_tokens=8192)


def test_a_model_that_fits_nowhere_in_its_generation_says_so() -> None:
    spec = find_model("kimi-k3")
    with pytest.raises(DoesNotFit, match="no tpu7x slice would do"):
        require_fit(spec, find_slice("tpu7x-8"), context_tokens=1_000_000, num_requests=1_000_000)


def test_what_fits_is_returned() -> None:
    assert require_fit(find_model("qwen3-8b"), find_slice("v6e-4"), context_tokens=4096, num_requests=4).fits


@pytest.mark.parametrize(
    ("context_tokens", "num_requests", "num_draft_tokens", "message"),
    [
        (-1, 1, 0, "context is -1 tokens"),
        (50_000, 1, 0, "it must be 0 to 40960, the limit of qwen3-8b"),
        (1, 0, 0, "number of requests is 0"),
        (1, 10**9, 0, "number of requests is 1000000000"),
        (1, 1, -1, "drafted tokens are -1"),
        (1, 1, 10_000, "drafted tokens are 10000"),
    ],
)
def test_absurd_numbers_are_refused(
    context_tokens: int, num_requests: int, num_draft_tokens: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(
            find_model("qwen3-8b"),
            find_slice("v6e-4"),
            context_tokens=context_tokens,
            num_requests=num_requests,
            num_draft_tokens=num_draft_tokens,
        )


def test_activations_have_room_for_one_chunk_and_for_what_all_requests_decode() -> None:
    spec, where = find_model("llama-3.1-8b"), find_slice("v6e-4")
    # Eight bf16 vectors of 4,096 on each of 4 devices, and two float32 logits of each decoded row.
    row, logits = 8 * 2 * 4096 * 4, 2 * 4 * 128_256
    for num_requests, num_draft_tokens in ((1, 0), (32, 0), (32, 3)):
        found = fit(
            spec, where, context_tokens=0, num_requests=num_requests, num_draft_tokens=num_draft_tokens
        ).scratch_bytes
        assert found == 2048 * row + num_requests * (1 + num_draft_tokens) * (row + logits)
