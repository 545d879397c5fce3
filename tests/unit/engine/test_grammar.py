"""Grammars: what they allow, what is refused and where, and that compiling holds nobody up."""

import itertools
import json
import queue
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from ostrya.engine.compiling import MAX_AT_ONCE, Compiled, Compiling
from ostrya.engine.grammar import Grammars, Matcher
from ostrya.engine.types import EngineRequest, Grammar, RequestId, Sampling
from ostrya.errors import InvalidRequest

EOS = 0
WORDS = [b"", *(bytes([byte]) for byte in range(32, 127)), b'{"', b'":', b"true", b"hello", b" world", "é".encode()]
IDS = {word: token_id for token_id, word in enumerate(WORDS)}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(WORDS, eos_token_ids=(EOS,))


def allowed(matcher: Matcher) -> set[bytes]:
    """What may come next; b"" is the end."""
    words_W = np.zeros(matcher.num_words, np.int32)
    matcher.fill(words_W)
    bits = np.unpackbits(words_W.view(np.uint8), bitorder="little")
    assert not bits[len(WORDS) :].any()
    return {WORDS[token_id] for token_id in bits.nonzero()[0]}


def say(matcher: Matcher, *words: bytes) -> None:
    for word in words:
        assert word in allowed(matcher)
        matcher.consume(IDS[word])


def test_a_choice_is_one_of_its_texts(grammars: Grammars) -> None:
    matcher = grammars.compile(Grammar(kind="choice", text=json.dumps(["hello", 'he "é', "no"])))
    assert allowed(matcher) == {b"h", b"hello", b"n"}
    say(matcher, b"h", b"e", b" ", b'"', "é".encode())
    assert (matcher.is_over, matcher.has_failed, allowed(matcher)) == (True, False, {b""})


def test_a_regex_may_end_where_it_is_complete(grammars: Grammars) -> None:
    matcher = grammars.compile(Grammar(kind="regex", text="[ab]+c?"))
    assert allowed(matcher) == {b"a", b"b"}
    say(matcher, b"a")
    assert allowed(matcher) == {b"a", b"b", b"c", b""}
    assert not matcher.is_over
    say(matcher, b"c")
    assert matcher.is_over


def test_a_schema_makes_json_of_its_form(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    matcher = grammars.compile(Grammar(kind="json_schema", text=json.dumps(schema)))
    say(matcher, b'{"', b"o", b"k", b'":')
    assert allowed(matcher) <= {b"t", b"true", b"f", b" "}
    say(matcher, b"true", b"}")
    assert matcher.is_over


def test_a_grammar_may_be_recursive(grammars: Grammars) -> None:
    matcher = grammars.compile(Grammar(kind="lark", text='start: "(" start ")" | "x"'))
    say(matcher, b"(", b"(", b"x", b")")
    assert allowed(matcher) == {b")"}
    assert not matcher.is_over
    say(matcher, b")")
    assert matcher.is_over


def test_an_output_that_goes_on_stands_where_the_other_ended(grammars: Grammars) -> None:
    grammar = Grammar(kind="regex", text="a{3}b")
    whole = grammars.compile(grammar)
    say(whole, b"a", b"a")
    resumed = grammars.compile(grammar, output=[IDS[b"a"]] * 2)
    assert allowed(resumed) == allowed(whole) == {b"a"}
    with pytest.raises(InvalidRequest, match="another form than the output so far"):
        grammars.compile(grammar, output=[IDS[b"b"]])


def test_one_grammar_serves_many_outputs_that_know_nothing_of_each_other(grammars: Grammars) -> None:
    one, two = (grammars.compile(Grammar(kind="regex", text="a+b")) for _ in range(2))
    say(one, b"a")
    assert (allowed(one), allowed(two)) == ({b"a", b"b"}, {b"a"})


def test_a_token_that_is_not_allowed_is_a_failure_and_not_an_end(grammars: Grammars) -> None:
    matcher = grammars.compile(Grammar(kind="regex", text="ab"))
    matcher.consume(IDS[b"z"])
    assert (matcher.is_over, matcher.has_failed) == (True, True)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"type": }', ("line 1 column 10",)),
        ("json_schema", '{"type":\n "objec"}', ("objec",)),
        ("json_schema", '{"properties": {"a": {"$ref": "#/nope"}}}', ("/nope",)),
        ("json_schema", '{"type": "string", "not": {}}', ('"not"', "at its root")),
        (
            "json_schema",
            '{"properties": {"a": {"type": "string"}, "b": {"items": {"anyOf": [{"type": "null"}, {"type": "nul"}]}}}}',
            ("nul", "(at /properties/b/items/anyOf/1)"),
        ),
        ("json_schema", "[" * 20_000, ("nested too deeply",)),
        ("json_schema", "7", ("must be an object or boolean",)),
        ("regex", "a(b", ("unclosed group", "a(b")),
        ("regex", "(?=a)b", ("look-around",)),
        ("lark", 'start: "a" | foo', ("at 1(8)", '"foo"')),
        ("lark", 'begin: "a"', ("no start rule",)),
        ("lark", "start: " + "x" * 5_000, ("...",)),
    ],
)
def test_a_mistake_is_refused_with_its_place(grammars: Grammars, kind: str, text: str, words: Sequence[str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammars.compile(Grammar(kind=kind, text=text))  # type: ignore[arg-type]
    assert refused.value.field == f"sampling.structured.{kind}"
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert len(str(refused.value)) < 600


class Held(Grammars):
    """Each compilation waits until it is let go."""

    def __init__(self) -> None:
        super().__init__(WORDS, eos_token_ids=(EOS,))
        self.gate = threading.Semaphore(0)

    def compile(self, grammar: Grammar, *, output: Sequence[int] = ()) -> Matcher:
        assert self.gate.acquire(timeout=30)
        return super().compile(grammar, output=output)


def request(name: str, *, text: str = "a") -> EngineRequest:
    sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=4, grammar=Grammar(kind="regex", text=text))
    return EngineRequest(request_id=RequestId(name), token_ids=[1], sampling=sampling)


class Bench:
    """A Compiling with a clock of its own, and what it posts."""

    def __init__(self) -> None:
        self.now = 0.0
        self.posted: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self.grammars = Held()
        self.compiling = Compiling(self.grammars, self.posted.put, limit_s=5, clock=lambda: self.now)

    def next(self) -> Compiled:
        self.grammars.gate.release()
        return self.posted.get(timeout=30)


def test_what_is_compiled_comes_back_with_its_request() -> None:
    bench = Bench()
    bench.compiling.begin(request("good"))
    done = bench.next()
    assert bench.compiling.is_wanted(done)
    assert isinstance(done.matcher, Matcher)
    bench.compiling.begin(request("bad", text="("))
    done = bench.next()
    assert bench.compiling.is_wanted(done)
    assert isinstance(done.matcher, InvalidRequest)


def test_few_are_compiled_at_a_time_and_all_in_the_end() -> None:
    bench = Bench()
    names = [f"r{number}" for number in range(MAX_AT_ONCE + 3)]
    for name in names:
        bench.compiling.begin(request(name))
    seen = []
    for _ in names:
        done = bench.next()
        assert bench.compiling.is_wanted(done)
        seen.append(done.request.request_id)
    assert sorted(seen) == names


def test_who_goes_away_meanwhile_is_forgotten() -> None:
    bench = Bench()
    for name in ("a", "b", "waiting", "last"):
        bench.compiling.begin(request(name))
    bench.compiling.abort(RequestId("a"))
    bench.compiling.abort(RequestId("waiting"))
    bench.compiling.abort(RequestId("unknown"))
    done = [bench.next() for _ in range(2)]
    wanted = [one.request.request_id for one in done if bench.compiling.is_wanted(one)]
    assert wanted == ["b"]
    assert bench.compiling.is_wanted(one := bench.next())
    assert one.request.request_id == "last"


def test_what_takes_too_long_is_refused_and_gives_its_place_up() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.compiling.begin(request(name))
    bench.compiling.abort(RequestId("b"))
    bench.now = 5.0
    assert bench.compiling.overdue() == {}
    bench.now = 5.1
    refused = bench.compiling.overdue()
    assert [(name, str(error)) for name, error in refused.items()] == [
        ("a", "sampling.structured is too complex; allowed: what compiles within 5 s; make it simpler")
    ]
    late = [bench.next() for _ in range(3)]
    assert [one.request.request_id for one in late if bench.compiling.is_wanted(one)] == ["c"]


def test_a_vocabulary_of_a_real_size_is_masked_in_whole_words() -> None:
    many = [b"", *(bytes(pair) for pair in itertools.product(range(97, 123), repeat=2)), b"a"]
    matcher = Grammars(many, eos_token_ids=(0,)).compile(Grammar(kind="regex", text="[a-c]+"))
    assert matcher.num_words == -(-len(many) // 32)
    words_W = np.zeros(matcher.num_words, np.int32)
    matcher.fill(words_W)
    assert np.unpackbits(words_W.view(np.uint8)).sum() == 3 * 3 + 1
