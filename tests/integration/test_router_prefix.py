"""The read path end to end: what workers publish through a real Redis decides where a router sends requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from ostrya.api.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from ostrya.engine.types import Load
from ostrya.prefix.chain import ChainKey, page_digests, root, routing_digests
from ostrya.router.app import Router
from ostrya.router.settings import RouterSettings
from ostrya.service.server import channel
from ostrya.worker.publisher import Publisher
from tests.fakes.pool import publishing
from tests.fakes.redis_server import RunningRedis, start_redis
from tests.fakes.tokenizer import byte_tokenizer
from tests.fakes.waiting import until
from tests.fakes.worker import FakeWorker, Identity

TOKENIZER = byte_tokenizer()
PAGE = Identity().page_size
ROOT = root(ChainKey(model="tiny", tokenizer_fingerprint=TOKENIZER.fingerprint))


class Pool:
    """A router and two workers that talk through Redis."""

    def __init__(self, redis: RunningRedis, router: Router, publishers: list[Publisher], target: str) -> None:
        self.redis = redis
        self.router = router
        self.publishers = publishers
        self.target = target

    async def holds(self, number: int, token_ids: list[int]) -> None:
        """Worker `number` publishes that it could continue from these; returns when the router knows."""
        digests = routing_digests(page_digests(ROOT, token_ids, page_size=PAGE), stride=1)
        before = self._blocks(number)
        self.publishers[number].publish(tuple(digests), (), Load())
        await until(lambda: self._blocks(number) == before + len(digests))

    async def ask(self, token_ids: list[int]) -> admin_pb2.ExplainRouteResponse:
        """One request; why it went where it went."""
        async with channel(self.target, max_message_bytes=1 << 20) as open_channel:
            inference = inference_pb2_grpc.InferenceServiceStub(open_channel)
            answers = [one async for one in inference.Generate(inference_pb2.GenerateRequest(token_ids=token_ids))]
            admin = admin_pb2_grpc.AdminServiceStub(open_channel)
            return await admin.ExplainRoute(admin_pb2.ExplainRouteRequest(decision_id=answers[-1].decision_id))

    def _blocks(self, number: int) -> int:
        return self.router.fleet.replicas()[number].indexed_blocks


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    redis = start_redis()
    async with AsyncExitStack() as stack:
        stack.callback(redis.stop)
        publishers = []
        for name in ("w0", "w1"):
            identity = Identity(worker_id=name, tokenizer_fingerprint=TOKENIZER.fingerprint)
            worker = await stack.enter_async_context(FakeWorker(identity))
            publishers.append(await stack.enter_async_context(publishing(redis.url, name, address=worker.address)))
        router = Router(RouterSettings(port=0, redis_url=redis.url), name="tiny", tokenizer=TOKENIZER)
        await stack.enter_async_context(router.serving())
        await until(lambda: len(router.fleet.snapshot().replicas) == 2)
        yield Pool(redis, router, publishers, f"127.0.0.1:{router.port}")


async def test_a_request_goes_to_the_worker_that_published_its_prefix(pool: Pool) -> None:
    prompts = [[number, *range(200)] for number in range(2)]
    for number, prompt in enumerate(prompts):
        await pool.holds(number, prompt[: 8 * PAGE])
    for number, prompt in enumerate(prompts):
        why = await pool.ask(prompt)
        cached = {row.worker_id: row.cached_tokens for row in why.candidates}
        assert (why.chosen, why.reason, why.level) == (f"w{number}", "prefix", admin_pb2.KNOWLEDGE_LEVEL_FRESH)
        assert cached == {f"w{number}": 8 * PAGE, f"w{1 - number}": 0}


async def test_a_killed_redis_fails_no_request_and_its_word_is_still_worth_something(pool: Pool) -> None:
    prompt = [7, *range(200)]
    await pool.holds(1, prompt[: 8 * PAGE])
    pool.redis.kill()
    await until(lambda: not pool.router.fleet.redis_up)
    answers = await asyncio.gather(*(pool.ask(prompt) for _ in range(5)))
    assert {(why.chosen, why.level) for why in answers} == {("w1", admin_pb2.KNOWLEDGE_LEVEL_FROZEN_INDEX)}
