from typing import cast

import pytest

from ostrya.client import GenerateOptions, Message
from ostrya.client.request import chat_messages, generate_request
from ostrya.errors import InvalidRequest

SECRET = "the secret plan"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": -1}, "sampling.seed is -1; allowed: an integer from 0 to 18446744073709551615"),
        ({"top_k": 10**11}, "sampling.top_k is 100000000000; allowed: an integer from 0 to 2147483647"),
        ({"max_tokens": 10**10}, "sampling.max_tokens is 10000000000; allowed: an integer from 0 to 2147483647"),
        ({"priority": "high"}, "priority is 'high'; allowed: an integer from -100 to 100"),
        ({"max_tokens": "ten"}, "sampling.max_tokens is 'ten'; allowed: an integer from 0 to 2147483647"),
        ({"temperature": "hot"}, "sampling.temperature is 'hot'; allowed: a number"),
        (
            {"logit_bias": {5: "much"}},
            "sampling.logit_bias is {5: 'much'}; "
            "allowed: a dictionary from an integer from 0 to 4294967295 to a number",
        ),
        (
            {"logit_bias": 5},
            "sampling.logit_bias is 5; allowed: a dictionary from an integer from 0 to 4294967295 to a number",
        ),
        (
            {"structured": {"json_schema": {"a": {1, 2}}}},
            "sampling.structured.json_schema is a value of type dict; allowed: what JSON can hold",
        ),
        (
            {"structured": {"schema": "{}"}},
            "sampling.structured is a value of type dict; "
            "allowed: a dictionary with one of json_schema, regex, choice, lark",
        ),
        (
            {"structured": {"choice": [1]}},
            "sampling.structured.choice[0] is a value of type int; allowed: valid UTF-8 text",
        ),
        ({"ignore_eos": "yes"}, "sampling.ignore_eos is 'yes'; allowed: true or false"),
        ({"stop_token_ids": [1, -2]}, "sampling.stop_token_ids[1] is -2; allowed: an integer from 0 to 4294967295"),
        ({"stop": ["a", SECRET + "\udcff"]}, "stop[1] is not valid UTF-8; allowed: valid UTF-8 text"),
        ({"stop": 5}, "stop is a value of type int; allowed: a list, each valid UTF-8 text"),
    ],
)
def test_an_option_that_cannot_be_sent_is_named_with_its_range(options: GenerateOptions, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request("hi", None, None, options)
    assert str(caught.value) == words


@pytest.mark.parametrize("text", [SECRET + "\udcff", [SECRET]])
def test_a_prompt_that_cannot_be_sent_is_refused_without_its_text(text: object) -> None:
    with pytest.raises(InvalidRequest, match=r"text is .*; allowed: valid UTF-8 text") as caught:
        generate_request(cast("str", text), None, None, {})
    assert SECRET not in str(caught.value)


def test_a_token_id_that_cannot_be_sent_is_named_by_its_place() -> None:
    with pytest.raises(InvalidRequest, match=r"token_ids\[2\] is 4294967296; allowed"):
        generate_request(None, None, [1, 2, 2**32], {})


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (5, "messages is a value of type int; allowed: a list"),
        (["hi"], "messages[0] is a value of type str; allowed: an object with role and content"),
        ([{"role": "user"}], "messages[0].content is absent; allowed: valid UTF-8 text"),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": 5}],
            "messages[1].content is a value of type int; allowed: valid UTF-8 text",
        ),
    ],
)
def test_a_message_that_is_none_is_named_by_its_place(messages: object, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_messages(cast("list[Message]", messages))
    assert str(caught.value) == words


def test_a_misspelled_option_is_refused_and_not_ignored() -> None:
    with pytest.raises(TypeError, match="unknown options: temprature; known: model"):
        generate_request("a", None, None, cast("GenerateOptions", {"temprature": 0}))


def test_one_stop_string_is_one_stop_string() -> None:
    assert list(generate_request("a", None, None, {"stop": "END"}).stop) == ["END"]


def test_an_answer_that_was_begun_is_asked_to_go_on() -> None:
    begun: list[Message] = [{"role": "assistant", "content": "Yes, "}]
    assert generate_request(None, begun, None, {"continue_final_message": True}).continue_final_message
    assert not generate_request(None, begun, None, {}).continue_final_message
