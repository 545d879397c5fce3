import asyncio
import math
from itertools import islice

import pytest

from ostrya.cli.load import FIRST_PLAIN_TOKEN, Plan, Prompt, Sample, Synthetic, run
from ostrya.cli.summary import percentile, summarise
from ostrya.client import AsyncClient
from ostrya.errors import Overloaded
from tests.fakes.router import FakeRouter


def synthetic(seed: int = 1) -> Synthetic:
    return Synthetic(prefix_groups=3, prefix_tokens=16, suffix_tokens=4, max_tokens=8, vocab_size=1000, seed=seed)


def test_prompts_share_exactly_the_prefixes_of_their_groups() -> None:
    prompts = [prompt["token_ids"] for prompt in islice(synthetic().prompts(), 200)]
    assert len({tuple(token_ids[:16]) for token_ids in prompts}) == 3
    assert len({tuple(token_ids[16:]) for token_ids in prompts}) == 200
    assert all(FIRST_PLAIN_TOKEN <= token < 1000 for token_ids in prompts for token in token_ids)


def test_a_seed_repeats_the_prompts() -> None:
    assert list(islice(synthetic(5).prompts(), 5)) == list(islice(synthetic(5).prompts(), 5))
    assert list(islice(synthetic(5).prompts(), 5)) != list(islice(synthetic(6).prompts(), 5))


def test_percentiles_are_linear_between_ranks() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, p) for p in (0, 50, 75, 100)] == [1.0, 2.5, 3.25, 4.0]
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))


def test_a_summary_counts_only_answered_requests_in_its_rates() -> None:
    full, fuller = (Sample(error="Overloaded", message=words) for words in ("full", "fuller"))
    good = Sample(
        ttft_s=0.1,
        duration_s=0.4,
        inter_token_s=[0.1, 0.2],
        prompt_tokens=100,
        cached_tokens=25,
        completion_tokens=3,
        replica="worker-0",
    )
    summary = summarise([good, full, good, fuller], 2.0)
    assert (summary["requests"], summary["answered"], summary["errors"]) == (4, 2, {"Overloaded": 2})
    assert summary["first_errors"] == {"Overloaded": "full"}
    assert (summary["requests_per_s"], summary["generated_tokens_per_s"], summary["cached_ratio"]) == (1.0, 3.0, 0.25)
    assert summary["by_replica"] == {"worker-0": 2}
    assert summary["inter_token_ms"] == {"p50": 150.0, "p90": 200.0, "p99": 200.0}


def test_a_summary_says_first_how_many_answers_were_simulated() -> None:
    real, simulated, failed = Sample(), Sample(is_simulated=True), Sample(error="Overloaded")
    assert "simulated" not in summarise([real, failed], 1.0)
    some = summarise([real, simulated, failed], 1.0)
    assert next(iter(some.items())) == (
        "simulated",
        "1 of 2 answers are of backend roofline, which computes nothing; its times are predictions",
    )
    assert str(summarise([simulated], 1.0)["simulated"]).startswith("all answers are of backend roofline")


def test_a_summary_of_nothing_has_no_percentiles() -> None:
    summary = summarise([], 0.0)
    assert summary["ttft_ms"] == {"p50": None, "p90": None, "p99": None}
    assert summary["requests_per_s"] == 0.0


def plan(**changes: float) -> Plan:
    values: dict[str, float] = {"concurrency": 2, "rate_per_s": 0.0, "max_requests": 10, "max_duration_s": 60.0}
    values |= changes
    return Plan(
        concurrency=int(values["concurrency"]),
        rate_per_s=values["rate_per_s"],
        max_requests=int(values["max_requests"]),
        max_duration_s=values["max_duration_s"],
        timeout_s=5.0,
        seed=0,
    )


@pytest.mark.parametrize("rate_per_s", [0.0, 500.0])
async def test_a_run_sends_as_many_as_planned(router: FakeRouter, rate_per_s: float) -> None:
    samples: list[Sample] = []
    async with AsyncClient(router.target) as client:
        await run(client, plan(rate_per_s=rate_per_s), synthetic().prompts(), samples.append)
    assert len(samples) == 10
    assert [one.completion_tokens for one in samples] == [4] * 10
    assert all(len(one.inter_token_s) == 3 for one in samples)


async def test_no_request_starts_after_the_duration(router: FakeRouter) -> None:
    samples: list[Sample] = []
    async with AsyncClient(router.target) as client:
        await run(client, plan(max_duration_s=0.0), synthetic().prompts(), samples.append)
    assert samples == []


async def test_a_failed_request_is_a_sample_and_the_run_goes_on(router: FakeRouter) -> None:
    router.failures = [Overloaded("full", retry_after_s=60)]
    samples: list[Sample] = []
    async with AsyncClient(router.target) as client:
        prompts = iter([Prompt(text="a", max_tokens=4)] * 3)
        await run(client, plan(max_requests=3, concurrency=1), prompts, samples.append)
    assert [(one.error, one.message) for one in samples] == [("Overloaded", "full"), ("", ""), ("", "")]


async def test_a_cancelled_run_cancels_its_requests(router: FakeRouter) -> None:
    router.hang_after = 1
    async with AsyncClient(router.target) as client:
        running = asyncio.create_task(run(client, plan(), synthetic().prompts(), lambda _: None))
        assert await asyncio.to_thread(router.hanging.wait, 5.0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await asyncio.to_thread(router.cancelled.wait, 5.0)
