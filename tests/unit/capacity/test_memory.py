"""What a request keeps, what fits, and what a model that does not fit is told."""

import pytest

from ostrya.capacity.chips import find_slice
from ostrya.capacity.costs import Work, costs
from ostrya.capacity.layers import Part
from ostrya.capacity.memory import (
    DoesNotFit,
    Fit,
    Placement,
    fit,
    kv_bytes,
    kv_bytes_per_token,
    require_fit,
    state_bytes,
    window_bytes,
)
from ostrya.capacity.models import find_model
from ostrya.errors import ConfigError


# Of 8,000 tokens: values x bytes of those layers that see everything and of those with a window; the state, fp32.
@pytest.mark.parametrize(
    ("name", "cache", "state"),
    [
        ("kimi-k3", 24 * 8000 * 576, 69 * 96 * 128 * 128 * 4),
        ("kimi-k2.5", 61 * 8000 * 576 * 2, 0),
        ("qwen3.8-27b", 16 * 8000 * 2 * 4 * 256 * 2, 48 * 48 * 128 * 128 * 4),
        ("qwen3.5-397b-a17b", 15 * 8000 * 2 * 2 * 256 * 2, 45 * 64 * 128 * 128 * 4),
        # A window in all 43 layers; entries of 512 and index keys of 128 for every 4 tokens in 21, for every 128 in 20.
        ("deepseek-v4-flash", 43 * 128 * 512 + 21 * 2000 * (512 + 128) + 20 * 62.5 * 512, 0),
        # Of 40 layers with a window three keep entries and index keys for every second token, one for every token.
        ("deepseek-v4.1-flash", (40 * 128 * 512 + (3 * 4000 + 8000) * (512 + 128)) * 4.45 / 8, 0),
        # Layers 6, 12, ... and 48 of 52 see everything.
        ("beam-1.0-501b", (8 * 8000 + 44 * 512) * 2 * 8 * 128 * 2, 0),
        ("llama-3.1-8b", 32 * 8000 * 2 * 8 * 128 * 2, 0),
        ("llama-3.1-70b", 80 * 8000 * 2 * 8 * 128 * 2, 0),
        ("qwen3-8b", 36 * 8000 * 2 * 8 * 128 * 2, 0),
        ("qwen3-30b-a3b", 48 * 8000 * 2 * 4 * 128 * 2, 0),
        # Layers 6, 12 and 18 see everything.
        ("gemma-3-270m", (3 * 8000 + 15 * 512) * 2 * 1 * 256 * 2, 0),
        ("gpt-oss-120b", (18 * 8000 + 18 * 128) * 2 * 8 * 64 * 2, 0),
        ("smollm2-135m", 30 * 8000 * 2 * 3 * 64 * 2, 0),
        # Layers 1, 5, ... and 61 of 62, counted from zero, see everything.
        ("muse-spark-1.2", (16 * 8000 + 46 * 2048) * 2 * 16 * 64 * 2, 0),
    ],
)
def test_a_request_keeps_what_its_layers_keep(name: str, cache: float, state: int) -> None:
    spec = find_model(name)
    assert kv_bytes(spec, 8000) == pytest.approx(cache, rel=1e-12)
    assert state_bytes(spec) == state


# Announced, or measured by others: Kimi K3's 434 MB of state, 13.8 KB a token; Qwen3.8's 151 MB, 64 KiB; V4.1's 890 B.
@pytest.mark.parametrize(
    ("name", "per_token", "state"),
    [("kimi-k3", 13.8e3, 434e6), ("qwen3.8-27b", 65_536, 151e6), ("deepseek-v4.1-flash", 890, 0)],
)
def test_a_request_keeps_what_is_published(name: str, per_token: float, state: float) -> None:
    spec = find_model(name)
    assert kv_bytes_per_token(spec) == pytest.approx(per_token, rel=0.002)
    assert state_bytes(spec) == pytest.approx(state, rel=0.001)


def test_windows_stop_growing() -> None:
    spec = find_model("gpt-oss-120b")
    # Half of 36 layers see 128 tokens.
    per_layer = 2 * 8 * 64 * 2
    assert kv_bytes(spec, 100) == 36 * 100 * per_layer
    assert kv_bytes_per_token(spec) == 18 * per_layer
    assert window_bytes(spec) == 18 * 128 * per_layer


def test_tensor_parallelism_copies_what_it_cannot_cut() -> None:
    where = find_slice("tpu7x-16")
    placement = Placement.TENSOR_PARALLEL
    mla = find_model("kimi-k3")
    assert kv_bytes(mla, 1000, num_devices=where.num_devices, placement=placement) == 32 * kv_bytes(mla, 1000)
    grouped = find_model("llama-3.1-8b")
    # Eight KV heads: less than one on a device is a copy, more than one on a device is none.
    for num_devices in (4, 8):
        assert kv_bytes(grouped, 1000, num_devices=num_devices, placement=placement) == kv_bytes(grouped, 1000)
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
    assert found.usable_bytes == pytest.approx(0.9 * 16 * 192 * 2**30)
    assert found.weights_bytes / 16 == pytest.approx(97.5e9, rel=0.01)
    assert found.max_requests > 1000
    assert found.max_context_tokens == 1_048_576


@pytest.mark.parametrize(
    ("name", "on", "num_draft_tokens"), [("llama-3.1-8b", "v6e-1", 0), ("qwen3.8-27b", "v6e-4", 7)]
)
def test_the_largest_batch_and_the_longest_context_fit_and_one_more_does_not(
    name: str, on: str, num_draft_tokens: int
) -> None:
    def asked(num_requests: int, context_tokens: int) -> Fit:
        return fit(
            find_model(name),
            find_slice(on),
            context_tokens=context_tokens,
            num_requests=num_requests,
            num_draft_tokens=num_draft_tokens,
        )

    largest, longest = asked(1, 4096).max_requests, asked(8, 1).max_context_tokens
    assert 0 < largest < 1_000_000
    assert 0 < longest < find_model(name).max_context_tokens
    assert asked(largest, 4096).fits
    assert not asked(largest + 1, 4096).fits
    assert asked(8, longest).fits
    assert not asked(8, longest + 1).fits


def test_weights_that_do_not_fit_leave_room_for_nothing() -> None:
    found = fit(find_model("kimi-k3"), find_slice("v6e-1"), context_tokens=0)
    assert (found.fits, found.max_requests, found.max_context_tokens) == (False, 0, 0)


def test_speculation_needs_room_for_its_drafter_and_checkpoints() -> None:
    spec, where = find_model("kimi-k3"), find_slice("tpu7x-16")
    plain = fit(spec, where, context_tokens=1000)
    assert plain.num_requests == 1
    drafting = fit(spec, where, context_tokens=1000, num_draft_tokens=7)
    assert drafting.state_bytes_per_request == 8 * plain.state_bytes_per_request
    assert drafting.drafter_bytes > plain.drafter_bytes == 0
    # Five layers of DSpark: 16 heads of 64, keys and values in fp8, and a window that is not full yet.
    drafters_cache = 5 * 2 * 16 * 64 * 1000
    assert drafting.cache_bytes_per_request == plain.cache_bytes_per_request + drafters_cache
    assert drafting.max_requests < plain.max_requests


def test_a_model_that_does_not_fit_says_by_how_much_and_which_slice_of_its_generation_would_do() -> None:
    spec = find_model("llama-3.1-70b")
    # 0.9 of 4 chips of 32 GB; the weights, one request, a chunk's activations and one row's, and its logits twice.
    usable = 0.9 * 4 * 32e9
    row = 8 * 2 * 8192 * 4
    needed = 2 * 70_553_706_496 + 80 * 8192 * 2 * 8 * 128 * 2 + 2049 * row + 2 * 4 * 128_256
    # tpu7x-1 and v5p-4 have room too, and are smaller.
    with pytest.raises(
        DoesNotFit,
        match=rf"1 x 8192 tokens needs 144\.9 GB of v6e-4's 115\.2 GB usable: {needed - usable:.0f} bytes too many; "
        "v6e-8 would do",
    ):
        require_fit(spec, find_slice("v6e-4"), context_tokens=8192)


# v6e has 28.8 GB usable a chip.
@pytest.mark.parametrize(
    ("name", "num_requests", "context_tokens", "num_draft_tokens", "chunk_tokens", "placement", "would"),
    [
        # 16.1 GB of weights and 13.1 GB of cache: not on one chip.
        ("llama-3.1-8b", 1, 100_000, 0, 2048, Placement.SPREAD, "v6e-4 would do"),
        # 839 GB of cache: not on 16 chips (461 GB), but on 32 (922 GB).
        ("llama-3.1-8b", 64, 100_000, 0, 2048, Placement.SPREAD, "v6e-32 would do"),
        # Its 8 KV heads are copied 4 times on 32 chips, 32 times on 256.
        ("llama-3.1-8b", 64, 100_000, 0, 2048, Placement.TENSOR_PARALLEL, "no v6e slice would do"),
        # 65,536 bytes of activations a token on every chip: 26.2 GB, which leaves 2 GB a chip for the weights.
        ("llama-3.1-8b", 1, 0, 0, 400_000, Placement.SPREAD, "v6e-8 would do"),
        # 54.7 GB of weights; 64 requests of 0.52 GB of cache and 0.15 GB of state are 43 GB.
        ("qwen3.8-27b", 64, 8000, 0, 2048, Placement.SPREAD, "v6e-4 would do"),
        # 4 GB of drafter and eight states each: 58.7 + 111 GB; four chips have 115.
        ("qwen3.8-27b", 64, 8000, 7, 2048, Placement.SPREAD, "v6e-8 would do"),
    ],
)
def test_the_slice_that_would_do_is_asked_for_the_same_load(
    name: str,
    num_requests: int,
    context_tokens: int,
    num_draft_tokens: int,
    chunk_tokens: int,
    placement: Placement,
    would: str,
) -> None:
    with pytest.raises(DoesNotFit, match=f"; {would}"):
        require_fit(
            find_model(name),
            find_slice("v6e-1"),
            context_tokens=context_tokens,
            num_requests=num_requests,
            num_draft_tokens=num_draft_tokens,
            chunk_tokens=chunk_tokens,
            placement=placement,
        )


def test_only_candidates_are_named_the_smallest_of_them() -> None:
    spec, where = find_model("llama-3.1-70b"), find_slice("v6e-4")
    for names, would in ((("v6e-64", "tpu7x-4", "v6e-16"), "v6e-16 would do"), ((), "no v6e slice would do")):
        with pytest.raises(DoesNotFit, match=would):
            require_fit(spec, where, context_tokens=8192, candidates=[find_slice(name) for name in names])


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
        (40_961, 1, 0, "it must be 0 to 40960, the limit of qwen3-8b"),
        (1, 0, 0, "number of requests is 0"),
        (1, 1_000_001, 0, "number of requests is 1000001; it must be 1 to 1000000"),
        (1, 1, -1, "drafted tokens are -1"),
        (1, 1, 65, "drafted tokens are 65; they must be 0 to 64"),
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


# tpu7x has two devices a chip, and each holds activations of its own.
@pytest.mark.parametrize(("name", "num_devices"), [("v6e-4", 4), ("tpu7x-4", 8)])
@pytest.mark.parametrize(
    ("num_requests", "num_draft_tokens", "chunk_tokens"), [(1, 0, 2048), (32, 0, 2048), (32, 3, 2048), (32, 3, 512)]
)
def test_activations_have_room_for_one_chunk_and_for_what_all_requests_decode(
    name: str, num_devices: int, num_requests: int, num_draft_tokens: int, chunk_tokens: int
) -> None:
    # Eight bf16 vectors of 4,096 on each device, and two float32 logits of each decoded row.
    row, logits = 8 * 2 * 4096 * num_devices, 2 * 4 * 128_256
    found = fit(
        find_model("llama-3.1-8b"),
        find_slice(name),
        context_tokens=0,
        num_requests=num_requests,
        num_draft_tokens=num_draft_tokens,
        chunk_tokens=chunk_tokens,
    )
    assert found.scratch_bytes == chunk_tokens * row + num_requests * (1 + num_draft_tokens) * (row + logits)


def test_the_largest_batch_and_the_longest_context_are_those_that_memory_divides_into() -> None:
    # v6e-1: 28.8 GB less 16,060,522,496 bytes of weights and a chunk of 2,048 x 65,536 bytes are 12,605,259,776.
    # A request of 64 tokens takes 64 x 131,072 of cache, 65,536 of activations, 1,026,048 of logits: 9,480,192.
    found = fit(find_model("llama-3.1-8b"), find_slice("v6e-1"), context_tokens=64, num_requests=8)
    assert found.usable_bytes == pytest.approx(28.8e9)
    assert found.max_requests == 1329
    # An eighth of it less activations and logits is 1,574,565,888 bytes: 12,012.9 times 131,072.
    assert found.max_context_tokens == 12_012
    assert found.needed_bytes == 16_060_522_496 + 2048 * 65_536 + 8 * 9_480_192
    assert found.free_bytes == pytest.approx(28.8e9 - found.needed_bytes)
