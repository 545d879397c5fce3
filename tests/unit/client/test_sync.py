import gc
import threading
from collections.abc import Iterator

import pytest

from ostrya.api.v1 import common_pb2
from ostrya.client import Client, StructuredOutput, Usage
from ostrya.errors import DeadlineExceeded, EngineDied, InvalidRequest, NotFound, OstryaError, Overloaded, Unavailable
from tests.fakes.router import FakeRouter

WAIT_S = 30.0


@pytest.fixture
def client(router: FakeRouter) -> Iterator[Client]:
    with Client(router.target) as client:
        yield client


def test_a_stream_yields_chunks_then_tells_how_it_went(client: Client) -> None:
    stream = client.generate("What is ironwood?", request_id="mine")
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == "Ironwood is hard."
    assert [token for chunk in chunks for token in chunk.token_ids] == [0, 1, 2, 3]
    assert stream.usage == Usage(prompt_tokens=7, completion_tokens=4, cached_tokens=4)
    assert (stream.finish_reason, stream.replica, stream.decision_id) == ("stop", "worker-0", "decision-1")
    assert stream.request_id == "mine"


def test_every_option_is_sent_and_none_under_another_name(router: FakeRouter, client: Client) -> None:
    client.generate(
        "hi",
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        typical_p=0.75,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=1,
        logit_bias={7: -0.5},
        bad_words=["no"],
        min_tokens=2,
        max_tokens=9,
        seed=4,
        stop_token_ids=[1],
        ignore_eos=True,
        n=2,
        priority=-3,
        logprobs=0,
        prompt_logprobs=1,
    ).read()
    (sent,) = router.requests
    assert sent.sampling == common_pb2.SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        typical_p=0.75,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=1,
        logit_bias={7: -0.5},
        min_tokens=2,
        max_tokens=9,
        seed=4,
        stop_token_ids=[1],
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=1,
    )
    assert (list(sent.bad_words), sent.n, sent.priority) == (["no"], 2, -3)


def test_a_form_is_sent_as_it_was_given_and_a_schema_as_json(router: FakeRouter, client: Client) -> None:
    forms: list[StructuredOutput] = [
        {"json_schema": {"type": "object"}},
        {"json_schema": '{"type": "string"}'},
        {"regex": "a+"},
        {"choice": ["yes", "no"]},
        {"lark": 'start: "a"'},
    ]
    for form in forms:
        client.generate("hi", structured=form).read()
    assert [request.sampling.structured for request in router.requests] == [
        common_pb2.StructuredOutput(json_schema='{"type": "object"}'),
        common_pb2.StructuredOutput(json_schema='{"type": "string"}'),
        common_pb2.StructuredOutput(regex="a+"),
        common_pb2.StructuredOutput(choice=["yes", "no"]),
        common_pb2.StructuredOutput(lark='start: "a"'),
    ]


def test_several_answers_come_chunk_by_chunk_and_end_one_by_one(client: Client) -> None:
    stream = client.generate("hi", n=3)
    assert [chunk.choice for chunk in stream][:6] == [0, 1, 2, 0, 1, 2]
    assert set(stream.ends) == {0, 1, 2}
    assert stream.ends[2] == ("stop", Usage(prompt_tokens=7, completion_tokens=4, cached_tokens=4))
    assert (stream.finish_reason, stream.usage) == stream.ends[0]
    assert client.generate("hi", n=2).read_all() == ["Ironwood is hard.", "IRONWOOD IS HARD."]
    assert client.generate("hi", n=2).read() == "Ironwood is hard."


def test_log_probabilities_stand_beside_their_tokens(client: Client) -> None:
    stream = client.generate("hi", logprobs=2, prompt_logprobs=2)
    chunks = [chunk for chunk in stream if chunk.token_ids]
    assert [-one.logprob for chunk in chunks for one in chunk.logprobs] == [0, 1, 2, 3]
    assert chunks[0].logprobs[0].top == ((0, -0.5), (1, -0.5))
    assert [-one.logprob for one in stream.prompt_logprobs] == [100]
    assert all(chunk.logprobs == () for chunk in client.generate("hi"))


def test_absent_sampling_fields_stay_absent_and_zero_is_sent(router: FakeRouter, client: Client) -> None:
    client.generate(messages=[{"role": "user", "content": "hi"}], temperature=0.0, stop=["."]).read()
    sampling = router.requests[0].sampling
    assert sampling.HasField("temperature")
    assert sampling.temperature == 0.0
    assert [field.name for field, _ in sampling.ListFields()] == ["temperature"]
    assert (router.requests[0].messages[0].content, list(router.requests[0].stop)) == ("hi", ["."])


def test_errors_are_typed_and_keep_the_servers_words(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="text is ''; allowed: at least one token") as caught:
        client.generate("").read()
    assert caught.value.field == "text"
    with pytest.raises(NotFound, match="kept for ten minutes"):
        client.explain("gone")


def test_pushback_is_followed_before_the_first_message(router: FakeRouter, client: Client) -> None:
    router.failures = [Overloaded("full", retry_after_s=0.01), Unavailable("down", retry_after_s=0.01)]
    assert client.generate("hello").read() == "Ironwood is hard."
    assert len(router.requests) == 3


def test_retry_stops_after_three_tries(router: FakeRouter, client: Client) -> None:
    router.failures = [Overloaded("full", retry_after_s=0.01) for _ in range(5)]
    with pytest.raises(Overloaded):
        client.generate("hello").read()
    assert len(router.requests) == 3


def test_retry_stops_after_the_first_message(router: FakeRouter, client: Client) -> None:
    router.fail_after = (2, EngineDied("engine ended", retry_after_s=0.01))
    stream = client.generate("hello")
    assert [next(stream).text, next(stream).text] == ["Iron", "wood "]
    with pytest.raises(EngineDied):
        next(stream)
    assert len(router.requests) == 1


def test_a_failed_try_is_told_before_the_wait(router: FakeRouter) -> None:
    told: list[tuple[str, float]] = []
    router.failures = [Unavailable("down", retry_after_s=0.01)]
    with Client(router.target, on_retry=lambda error, delay_s: told.append((str(error), delay_s))) as client:
        assert client.generate("hello").read() == "Ironwood is hard."
    assert told == [("down", 0.01)]


def test_what_cannot_be_sent_is_refused_at_once(router: FakeRouter, client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.seed is -1"):
        client.generate("hello", seed=-1)
    with pytest.raises(InvalidRequest, match="text is not valid UTF-8"):
        client.tokenize("\udcff")
    with pytest.raises(InvalidRequest, match="decision_id is not valid UTF-8"):
        client.explain("\udcff")
    assert router.requests == []


def test_unary_calls_follow_pushback_too(router: FakeRouter, client: Client) -> None:
    router.failures = [Overloaded("full", retry_after_s=0.01)]
    assert client.tokenize("ab") == [97, 98]


def test_the_timeout_ends_a_silent_stream(router: FakeRouter, client: Client) -> None:
    router.hang_after = 1
    stream = client.generate("hello", timeout_s=0.3)
    with pytest.raises(DeadlineExceeded):
        stream.read()
    assert router.cancelled.wait(WAIT_S)


def test_leaving_the_with_block_cancels(router: FakeRouter, client: Client) -> None:
    router.hang_after = 1
    with client.generate("hello") as stream:
        next(stream)
    assert router.cancelled.wait(WAIT_S)
    assert list(stream) == []


def test_a_forgotten_stream_cancels(router: FakeRouter, client: Client) -> None:
    router.hang_after = 1
    stream = client.generate("hello")
    next(stream)
    del stream
    gc.collect()
    assert router.cancelled.wait(WAIT_S)


def test_closing_from_another_thread_ends_the_stream(router: FakeRouter, client: Client) -> None:
    router.hang_after = 1
    stream = client.generate("hello")
    next(stream)
    closer = threading.Timer(0.05, stream.close)
    closer.start()
    assert stream.read() == ""
    closer.join()


def test_nobody_there_names_the_target() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 cannot be reached"):
        client.generate("hello").read()


def test_a_worker_is_cordoned_drained_and_uncordoned(router: FakeRouter, client: Client) -> None:
    router.num_cancelled = 2
    client.cordon("worker-0")
    assert client.drain("worker-0", drain_timeout_s=1.5) == 2
    client.drain("worker-0")
    client.uncordon("worker-0")
    assert router.orders == [
        ("cordon", "worker-0", None),
        ("drain", "worker-0", 1.5),
        ("drain", "worker-0", None),
        ("uncordon", "worker-0", None),
    ]
    with pytest.raises(NotFound, match="replicas: worker-0"):
        client.cordon("worker-9")


def test_the_routers_status_comes_as_it_says(client: Client) -> None:
    status = client.status()
    assert (status.version, status.num_waiting, status.HasField("kubernetes_connected")) == ("1.2.3", 2, False)


def test_a_closed_client_does_not_try_again(router: FakeRouter) -> None:
    router.hang_after = 0
    client = Client(router.target)
    stream = client.generate("hello")
    assert router.hanging.wait(WAIT_S)
    closer = threading.Timer(0.05, client.close)
    closer.start()
    with pytest.raises(OstryaError, match="CANCELLED"):
        stream.read()
    closer.join()
    assert len(router.requests) == 1


def test_models_and_replicas_come_as_the_server_says(client: Client) -> None:
    assert [model.name for model in client.models()] == ["tiny"]
    assert [replica.worker_id for replica in client.replicas().replicas] == ["worker-0"]
    assert client.explain("decision-1").chosen == "worker-0"
