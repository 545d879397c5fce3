"""The request path over real sockets: one router, fake workers, no Redis. What clients see when replicas misbehave."""

import asyncio
import math
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import pytest
from google.rpc import error_details_pb2

from ostrya.api.v1 import admin_pb2, common_pb2, inference_pb2
from ostrya.client import AsyncClient
from ostrya.client.attempts import Unreached
from ostrya.errors import Unavailable
from ostrya.router.settings import RouterSettings
from ostrya.service import status
from tests.fakes.tokenizer import TURN
from tests.fakes.waiting import until
from tests.fakes.worker import Behaviour, Refusal
from tests.integration.bed import (
    LENGTH,
    STOP,
    Params,
    Request,
    Response,
    bed,
    details_of,
    saying,
    text_of,
    tokens_of,
)


async def test_a_text_is_answered_with_usage_replica_and_ids() -> None:
    async with bed(replace(saying("Iron wood 🌲."), cached_tokens=2)) as stand:
        responses = await stand.ask(Request(text="What?", request_id="mine"))
        last = responses[-1]
        assert text_of(responses) == "Iron wood 🌲."
        assert last.finish_reason == STOP
        assert last.usage == common_pb2.Usage(prompt_tokens=5, completion_tokens=16, cached_tokens=2)
        assert all((one.replica, one.request_id) == ("w0", "mine") for one in responses)
        assert all("\N{REPLACEMENT CHARACTER}" not in one.text for one in responses)
        (sent,) = stand.workers[0].record.requests
        assert bytes(sent.token_ids) == b"What?"
        assert sent.sampling.HasField("seed"), "drawn by the router, so that any replica can continue"
        await stand.idle()


async def test_chat_goes_through_the_models_template() -> None:
    async with bed(saying("ok")) as stand:
        await stand.ask(Request(messages=[inference_pb2.ChatMessage(role="user", content="hi")]))
        (sent,) = stand.workers[0].record.requests
        assert list(sent.token_ids) == [TURN, *b"user: hi", TURN]
        same = await stand.inference.Tokenize(
            inference_pb2.TokenizeRequest(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
        )
        assert list(same.token_ids) == list(sent.token_ids)


async def test_a_stop_string_ends_the_answer_and_the_replicas_work() -> None:
    async with bed(saying("one STOP two three four")) as stand:
        stand.workers[0].next_token.close()
        stand.workers[0].next_token.allow(10)
        responses = await stand.ask(Request(text="a", stop=["STOP"]))
        assert (text_of(responses), responses[-1].finish_reason) == ("one ", STOP)
        assert responses[-1].usage.completion_tokens == 8
        await stand.workers[0].until(lambda one: len(one.record.cancelled) == 1)
        await stand.idle()


async def test_max_tokens_ends_with_length() -> None:
    async with bed(saying("a long answer")) as stand:
        responses = await stand.ask(Request(text="a", sampling=Params(max_tokens=6)))
        assert (text_of(responses), responses[-1].finish_reason) == ("a long", LENGTH)


@pytest.mark.parametrize("refusal", [Refusal.UNAVAILABLE, Refusal.QUEUE_FULL, Refusal.FAULT])
async def test_before_the_first_token_another_replica_is_tried(refusal: Refusal) -> None:
    async with bed(Behaviour(refusal=refusal), Behaviour(refusal=refusal)) as stand:
        stand.workers[1].behaviour = saying("from one")
        for number in range(6):
            responses = await stand.ask(Request(text=f"prompt {number}", sampling=Params(seed=number)))
            assert (text_of(responses), responses[-1].replica) == ("from one", "w1")
            await stand.until(ready=2)
        assert stand.workers[0].record.refused, "six prompts do not all fall on the second of two"
        await stand.idle()


@pytest.mark.parametrize("fault", ["breaks_after_tokens", "dies_after_tokens", "garbles_after_tokens"])
async def test_after_the_first_token_the_answer_continues_exactly_elsewhere(fault: str) -> None:
    """The tokens are those of an undisturbed run with the same seed, and the usage that of one request."""
    request = Request(token_ids=range(10, 60), sampling=Params(seed=1234, max_tokens=20))
    async with bed(Behaviour(num_tokens=50, cached_tokens=16)) as undisturbed:
        expected = await undisturbed.ask(request)
    first, second = Behaviour(num_tokens=50, cached_tokens=16), Behaviour(num_tokens=50, cached_tokens=48)
    async with bed(first, second) as stand:
        for worker in stand.workers:
            setattr(worker.behaviour, fault, 7)
        asking = asyncio.create_task(stand.ask(request))
        await asyncio.wait(
            [asyncio.create_task(worker.until(lambda one: len(one.record.requests) == 1)) for worker in stand.workers],
            return_when=asyncio.FIRST_COMPLETED,
        )
        broken, healthy = sorted(stand.workers, key=lambda one: len(one.record.requests), reverse=True)
        setattr(healthy.behaviour, fault, None)
        responses = await asking
        assert tokens_of(responses) == tokens_of(expected)
        assert text_of(responses) == text_of(expected)
        assert responses[-1].finish_reason == LENGTH
        assert responses[-1].usage == common_pb2.Usage(
            prompt_tokens=50, completion_tokens=20, cached_tokens=broken.behaviour.cached_tokens
        )
        (resumed,) = healthy.record.requests
        assert list(resumed.token_ids) == [*range(10, 60), *tokens_of(expected)[:7]]
        assert (resumed.sampling.seed, resumed.sampling.max_tokens) == (1234, 13)
        assert {one.replica for one in responses} == {broken.identity.worker_id, healthy.identity.worker_id}
        await stand.idle()


async def test_a_continuation_tells_output_from_prompt_and_repeats_no_log_probability() -> None:
    sampling = Params(seed=1, max_tokens=20, min_tokens=12, logprobs=0, prompt_logprobs=0, presence_penalty=1)
    async with bed(Behaviour(num_tokens=50), Behaviour(num_tokens=50)) as stand:
        for worker in stand.workers:
            worker.behaviour.breaks_after_tokens = 7
        responses = await stand.ask(Request(token_ids=range(10, 20), sampling=sampling, bad_words=["no"]))
        tries = sorted(
            (request for worker in stand.workers for request in worker.record.requests),
            key=lambda request: request.num_output_tokens,
        )
        assert [(one.num_output_tokens, one.sampling.min_tokens) for one in tries] == [(0, 12), (7, 5), (14, 0)]
        assert all(one.sampling.presence_penalty == 1 for one in tries)
        assert all([bytes(word.token_ids) for word in one.bad_words] == [b"no", b" no"] for one in tries)
        assert [-one.logprob for each in responses for one in each.logprobs] == tokens_of(responses)
        assert [-one.logprob for each in responses for one in each.prompt_logprobs] == list(range(11, 20))
        await stand.idle()


async def test_n_answers_come_from_one_replica_with_noise_of_their_own_and_end_each_by_itself() -> None:
    async with bed(*[Behaviour(num_tokens=6) for _ in range(3)]) as stand:
        responses = await stand.ask(Request(text="What?", n=4, sampling=Params(seed=9, prompt_logprobs=0)))
        (worker,) = [one for one in stand.workers if one.record.requests]
        sent = worker.record.requests
        assert len({request.sampling.seed for request in sent}) == 4
        assert sum(request.sampling.HasField("prompt_logprobs") for request in sent) == 1
        for choice in range(4):
            own = [one for one in responses if one.choice == choice]
            assert [one.finish_reason for one in own if one.finish_reason] == [STOP]
            assert own[-1].usage.completion_tokens == len(tokens_of(own)) == 6
            assert [bool(one.prompt_logprobs) for one in own] == [choice == 0] + [False] * (len(own) - 1)
        alone = await stand.ask(Request(text="What?", sampling=Params(seed=9)))
        assert tokens_of(alone) == tokens_of([one for one in responses if one.choice == 0])
        await stand.idle()


async def test_a_stop_string_ends_one_of_n_answers_and_the_others_go_on() -> None:
    async with bed(replace(saying("ab, then END and more"), tokens_per_message=3)) as stand:
        worker = stand.workers[0]
        worker.next_token.close()
        asking = asyncio.create_task(stand.ask(Request(text="What?", n=2, stop=["END"])))
        await worker.until(lambda one: one.active == 2)
        worker.next_token.open()
        responses = await asking
        assert [text_of([one for one in responses if one.choice == choice]) for choice in (0, 1)] == ["ab, then "] * 2
        await stand.idle()


async def test_a_cancel_of_n_answers_reaches_all_of_them_and_each_has_a_place() -> None:
    async with bed(Behaviour(num_tokens=50)) as stand:
        worker = stand.workers[0]
        worker.next_token.close()
        call = stand.inference.Generate(Request(text="What?", n=3))
        await worker.until(lambda one: one.active == 3)
        assert stand.router.admission.in_flight == 3
        call.cancel()
        await worker.until(lambda one: len(one.record.cancelled) == 3)
        await stand.idle()


async def test_when_every_try_fails_the_last_reason_is_told() -> None:
    async with bed(Behaviour(refusal=Refusal.QUEUE_FULL), Behaviour(refusal=Refusal.QUEUE_FULL)) as stand:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stand.ask(Request(text="a"))
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(failed.value, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 50
        assert sum(len(worker.record.refused) for worker in stand.workers) == 2, "each replica once"
        await stand.idle()


async def test_a_replica_that_answers_garbage_has_failed_and_another_is_tried() -> None:
    async with bed(Behaviour(garbles_after_tokens=0), saying("from one")) as stand:
        for number in range(6):
            responses = await stand.ask(Request(text=f"prompt {number}", sampling=Params(seed=number)))
            assert (text_of(responses), responses[-1].replica) == ("from one", "w1")
        assert stand.workers[0].record.requests, "six prompts do not all fall on the second of two"
        stand.workers[1].behaviour = Behaviour(garbles_after_tokens=0)
        with pytest.raises(grpc.aio.AioRpcError, match="answered what does not decode") as failed:
            await stand.ask(Request(text="a"))
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        await stand.idle()


async def test_a_replica_that_says_garbage_of_itself_is_lost_until_it_does_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostrya.router.link._UNUSABLE_BACKOFF_S", 0.1)
    async with bed(saying("yes")) as stand:
        (worker,) = stand.workers
        worker.garbles_info = True
        await worker.stop()
        await stand.until(ready=0)
        await worker.start()
        await until(lambda: "what a worker says of itself does not decode; not used" in caplog.messages)
        assert "link ended by a fault of ours; starting it again" not in caplog.messages
        worker.garbles_info = False
        await stand.until(ready=1)
        assert text_of(await stand.ask(Request(text="a"))) == "yes"


async def test_a_cancel_reaches_the_replica_at_once_and_leaves_no_count() -> None:
    async with bed(saying("never told to the end")) as stand:
        stand.workers[0].next_token.close()
        call = stand.inference.Generate(Request(token_ids=[65, 66]), timeout=10)
        first = await call.read()
        assert isinstance(first, Response)
        started = asyncio.get_running_loop().time()
        call.cancel()
        await stand.workers[0].until(lambda one: len(one.record.cancelled) == 1)
        assert asyncio.get_running_loop().time() - started < 0.1
        await stand.idle()


async def test_a_cancel_before_the_first_token_reaches_the_replica_too() -> None:
    async with bed(Behaviour()) as stand:
        stand.workers[0].first_token.close()
        call = stand.inference.Generate(Request(token_ids=[65, 66]), timeout=10)
        await stand.workers[0].until(lambda one: one.active == 1)
        call.cancel()
        await stand.workers[0].until(lambda one: len(one.record.cancelled) == 1)
        await stand.idle()


async def test_the_deadline_ends_the_request_here_and_there() -> None:
    async with bed(Behaviour()) as stand:
        stand.workers[0].first_token.close()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stand.ask(Request(token_ids=[65]), timeout_s=0.2)
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await stand.workers[0].until(lambda one: len(one.record.cancelled) == 1)
        await stand.idle()


async def test_one_request_too_many_is_refused_with_retry_info_and_pushback() -> None:
    async with bed(Behaviour(), settings=RouterSettings(max_in_flight=1)) as stand:
        stand.workers[0].first_token.close()
        held = asyncio.create_task(stand.ask(Request(token_ids=[65])))
        await stand.workers[0].until(lambda one: one.active == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stand.ask(Request(token_ids=[66]))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(refused.value, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 500
        assert dict(refused.value.trailing_metadata())[status.PUSHBACK] == "500"
        stand.workers[0].first_token.open()
        assert tokens_of(await held)


async def test_without_a_replica_a_request_is_refused_with_retry_info() -> None:
    async with bed() as stand:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stand.ask(Request(text="a"))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no replica" in (refused.value.details() or "")
        assert details_of(refused.value, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
        await stand.idle()


async def test_a_request_waits_for_its_first_replica() -> None:
    async with bed(saying("here"), settings=RouterSettings(no_replica_wait_s=10.0)) as stand:
        (worker,) = stand.workers
        await worker.set_serving(False)
        await stand.until(ready=0)
        asking = asyncio.create_task(stand.ask(Request(text="a")))
        await until(lambda: stand.router.admission.in_flight == 1)
        await worker.set_serving(True)
        assert text_of(await asking) == "here"


async def test_a_deadline_that_passes_without_a_replica_is_a_deadline() -> None:
    async with bed(settings=RouterSettings(no_replica_wait_s=30.0)) as stand:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stand.ask(Request(text="a"), timeout_s=0.2)
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await stand.idle()


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (Request(), grpc.StatusCode.INVALID_ARGUMENT),
        (Request(text="a", sampling=Params(temperature=math.nan)), grpc.StatusCode.INVALID_ARGUMENT),
        (Request(token_ids=[1] * 2_048), grpc.StatusCode.INVALID_ARGUMENT),
        (Request(token_ids=[1_000]), grpc.StatusCode.INVALID_ARGUMENT),
        (Request(text="a", model="other"), grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_bad_input_never_reaches_a_replica(request_: Request, code: grpc.StatusCode) -> None:
    async with bed(Behaviour()) as stand:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stand.ask(request_)
        assert refused.value.code() is code
        assert not stand.workers[0].record.requests
        await stand.idle()


async def test_a_decision_is_explained_by_its_id() -> None:
    async with bed(saying("a"), saying("a")) as stand:
        (*_, last) = await stand.ask(Request(token_ids=range(200), request_id="why"))
        why = await stand.admin.ExplainRoute(admin_pb2.ExplainRouteRequest(decision_id=last.decision_id))
        assert (why.request_id, why.chosen, why.prompt_tokens, why.attempt) == ("why", last.replica, 200, 1)
        assert {row.worker_id for row in why.candidates} == {"w0", "w1"}
        assert why.reason in ("prefix", "load", "tie", "fallback")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stand.admin.ExplainRoute(admin_pb2.ExplainRouteRequest(decision_id="nope"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_siblings_land_together_before_the_first_event() -> None:
    """The journal says nothing here: only the prediction of the first pick can bring them together."""
    async with bed(Behaviour(), Behaviour()) as stand:
        replicas = {(await stand.ask(Request(token_ids=[*range(500), n])))[-1].replica for n in range(6)}
        assert len(replicas) == 1


async def test_operators_see_replicas_and_models() -> None:
    async with bed(Behaviour(), Behaviour()) as stand:
        listed = await stand.admin.ListReplicas(admin_pb2.ListReplicasRequest())
        assert [row.worker_id for row in listed.replicas] == ["w0", "w1"]
        assert all(row.state == admin_pb2.REPLICA_STATE_READY and row.prefix_credit for row in listed.replicas)
        assert not listed.redis_connected
        (model,) = (await stand.inference.ListModels(inference_pb2.ListModelsRequest())).models
        assert model == inference_pb2.Model(name="tiny", context_tokens=2_048, vocab_size=1_000, num_replicas_ready=2)


async def test_our_client_does_not_send_again_what_failed_replica_after_replica() -> None:
    poison = [Behaviour(breaks_after_tokens=0) for _ in range(5)]
    async with bed(*poison, settings=RouterSettings(max_attempts=3)) as stand:
        async with AsyncClient(f"127.0.0.1:{stand.router.port}") as client:
            await client.replicas()
            with pytest.raises(Unavailable, match="breaks off") as failed:
                await client.generate("a", timeout_s=30).read()
        assert not isinstance(failed.value, Unreached)
        assert sum(len(one.record.requests) for one in stand.workers) == 3
        await stand.idle()


async def test_a_drain_lets_running_streams_end() -> None:
    async with AsyncExitStack() as stack:
        stand = await stack.enter_async_context(bed(saying("to the end")))
        stand.workers[0].next_token.close()
        asking = asyncio.create_task(stand.ask(Request(text="a")))
        await stand.workers[0].until(lambda one: one.active == 1)
        draining = asyncio.create_task(stand.router._drain())
        stand.workers[0].next_token.open()
        assert text_of(await asking) == "to the end"
        await draining


async def test_many_streams_with_random_cancels_leave_every_count_at_zero() -> None:
    async with bed(Behaviour(num_tokens=30), Behaviour(num_tokens=30)) as stand:

        async def one(number: int) -> None:
            call = stand.inference.Generate(Request(token_ids=[number % 256, *range(40)]), timeout=20)
            for _ in range(number % 7 if number % 3 else 31):
                if await call.read() is grpc.aio.EOF:
                    return
            call.cancel()

        await asyncio.gather(*(one(number) for number in range(60)))
        await stand.idle()
