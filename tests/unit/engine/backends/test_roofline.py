"""Steps that compute nothing: they take their predicted time, one after another, and their tokens are what any other
worker would have drawn."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from ostrya.capacity.chips import find_slice
from ostrya.capacity.memory import DoesNotFit
from ostrya.capacity.models import find_model
from ostrya.engine.backends.roofline import RooflineRunner, load_runner
from ostrya.engine.config import EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.grammar import Grammars
from ostrya.engine.plan import StepPlan
from ostrya.engine.step_model import StepModel
from ostrya.engine.types import EngineRequest, Grammar, RequestId, Sampling, SequenceOutput
from ostrya.errors import ConfigError
from tests.unit.engine.plans import sized_plan

VOCAB_SIZE, EOS = 1000, 500
MODEL = StepModel(find_model("llama-3.1-8b"), find_slice("v6e-8"))
CONFIG = EngineConfig(
    model_path="llama-3.1-8b", model_name="m", tokenizer_fingerprint="", backend="roofline", slice="v6e-8"
)
SPELLED = [chr(token_id).encode() if 32 <= token_id < 127 else b"" for token_id in range(VOCAB_SIZE)]


class Clock:
    """Stands still but for who sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def runner_of(clock: Clock) -> RooflineRunner:
    return RooflineRunner(MODEL, vocab_size=VOCAB_SIZE, never=(EOS,), clock=clock, sleep=clock.sleep)


def drawn(plan: StepPlan) -> list[int]:
    tokens: list[int] = runner_of(Clock()).execute(plan).tokens().tolist()
    return tokens


def outputs(
    token_ids: list[int], *, overlap: bool = True, others: int = 0, num_output: int = 0, **sampling: object
) -> list[SequenceOutput]:
    """What an engine says to one request among others."""
    clock = Clock()
    config = msgspec.structs.replace(CONFIG, max_running=8, overlap=overlap, num_pages=200)
    engine = Engine(runner_of(clock), config, context_tokens=2000, eos_token_ids=(EOS,), clock=clock)
    engine.warm_up()
    asked = msgspec.structs.replace(
        Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=11, max_tokens=30 - num_output), **sampling
    )
    matcher = None if asked.grammar is None else Grammars(SPELLED, eos_token_ids=(EOS,)).compile(asked.grammar)
    for number in range(others):
        plain = Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=number, max_tokens=20)
        engine.submit(EngineRequest(request_id=RequestId(str(number)), token_ids=[number + 300] * 40, sampling=plain))
    request = EngineRequest(
        request_id=RequestId("it"), token_ids=token_ids, sampling=asked, num_output_tokens=num_output
    )
    engine.submit(request, matcher)
    told = []
    while (report := engine.step()) is not None:
        told += [output for output in report.outputs if output.request_id == "it"]
    assert engine.scheduler.pool.is_unused
    return told


def answer(token_ids: list[int], **wishes: object) -> list[int]:
    return [token for output in outputs(token_ids, **wishes) for token in output.token_ids]  # type: ignore[arg-type]


def test_steps_take_their_predicted_time_one_after_another_and_are_launched_at_once() -> None:
    clock = Clock()
    runner = runner_of(clock)
    plans = [sized_plan([100, 200]), sized_plan([101], [(0, 500)])]
    steps = [runner.execute(plan) for plan in plans]
    assert clock.now_s == 0
    first_s, second_s = (MODEL.seconds(plan).seconds for plan in plans)
    assert not steps[0].done()
    steps[0].tokens()
    assert clock.now_s == pytest.approx(first_s)
    assert steps[0].done()
    assert not steps[1].done()
    steps[1].scores()
    assert clock.now_s == pytest.approx(first_s + second_s)
    clock.now_s = 1.0
    runner.execute(plans[0]).tokens()
    assert clock.now_s == pytest.approx(1.0 + first_s), "an idle device begins when it is asked"


def test_closing_waits_for_what_was_launched() -> None:
    clock = Clock()
    runner = runner_of(clock)
    runner.execute(sized_plan([100]))
    runner.close()
    assert clock.now_s == pytest.approx(MODEL.seconds(sized_plan([100])).seconds)


def test_a_token_depends_on_its_row_alone() -> None:
    alone, together = sized_plan([5]), sized_plan([9, 5, 7])
    alone.token_ids[:], together.token_ids[:] = 42, (1, 42, 3)
    assert drawn(together)[1] == drawn(alone)[0]
    later = sized_plan([6])
    later.token_ids[:] = 42
    assert drawn(later) != drawn(alone)


def test_noise_decides_where_there_is_any_and_nowhere_else() -> None:
    plan = sized_plan([5])
    other = replace(plan, uniform=np.array([0.7], np.float32))
    assert drawn(other) == drawn(plan), "greedy"
    warm = np.ones(1, np.float32)
    assert drawn(replace(other, temperature=warm)) != drawn(replace(plan, temperature=warm))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_the_same_beside_others_without_overlap_and_continued_elsewhere(temperature: float) -> None:
    prompt = [300 + number % 7 for number in range(70)]
    tokens = answer(prompt, temperature=temperature)
    assert len(tokens) == 30
    assert len(set(tokens)) > 20
    assert answer(prompt, temperature=temperature, overlap=False, others=5) == tokens
    for num_received in (1, 16, 29):
        rest = answer([*prompt, *tokens[:num_received]], num_output=num_received, temperature=temperature)
        assert rest == tokens[num_received:]
    assert answer([*prompt[:-1], 299], temperature=temperature) != tokens


def test_tokens_are_plain_ones_of_the_vocabulary_and_none_ends_the_answer() -> None:
    tokens = [token for seed in range(12) for token in answer([300], seed=seed)]
    assert len(tokens) == 12 * 30
    assert all(256 <= token < VOCAB_SIZE for token in tokens)
    assert len(set(tokens)) > 250


def test_a_stop_token_ends_it_but_not_before_min_tokens() -> None:
    tokens = answer([300])
    stop = frozenset({tokens[3]})
    assert answer([300], stop_token_ids=stop) == tokens[:4]
    longer = answer([300], stop_token_ids=stop, min_tokens=10)
    assert len(longer) > 10
    assert tokens[3] not in longer[:10]


def test_forbidden_tokens_are_not_drawn() -> None:
    first, second = answer([300])[:2]
    other = answer([300], logit_bias={first: float("-inf")}, max_tokens=1)
    assert other != [first]
    assert answer([300], bad_words=((first, second),), max_tokens=2)[0] == first
    assert answer([300], bad_words=((first, second),), max_tokens=2)[1] != second


def test_an_answer_has_the_form_that_was_asked_for_and_ends_with_it() -> None:
    grammar = Grammar(kind="regex", text="(yes|no), [a-z]{3}[0-9]?")
    for seed in range(5):
        told = outputs([300], grammar=grammar, seed=seed)
        tokens = [token for output in told for token in output.token_ids]
        assert tokens[-1] == EOS
        assert told[-1].finish_reason == "stop"
        said = "".join(map(chr, tokens[:-1]))
        assert said[:3] in ("yes", "no,")
        assert said[-3:].isalpha(), "it ends as soon as it may"


def test_log_probabilities_have_the_right_form() -> None:
    told = outputs([300, 301, 302], num_top=2, num_prompt_top=1, max_tokens=3)
    assert [one.top_ids[0] for one in told[0].prompt_scores] == [301, 302]
    for output in told:
        (score,) = output.scores
        assert score.top_ids[0] == output.token_ids[0]
        assert len(score.top_ids) == 2
        assert 0 > score.logprob == score.top_logprobs[0] > score.top_logprobs[1]


def test_a_shape_that_was_not_warmed_up_is_late() -> None:
    runner = runner_of(Clock())
    runner.warm_up([sized_plan([1]).bucket])
    runner.execute(sized_plan([1]))
    runner.execute(sized_plan([1, 1]))
    assert (runner.num_shapes, runner.num_late_shapes) == (2, 1)


def test_a_loaded_model_is_what_capacity_knows_of_it_with_the_tokenizers_vocabulary() -> None:
    config = msgspec.structs.replace(CONFIG, model_path="kimi-k3", slice="tpu7x-16", vocab_size=1234, max_running=64)
    runner, model = load_runner(config)
    assert model.is_simulated
    assert (model.context_tokens, model.vocab_size, runner.vocab_size) == (1_048_576, 1234, 1234)
    assert model.weights.startswith("simulated: kimi-k3 on tpu7x-16; 1,560.7 GB of weights and ")
    assert model.num_pages is not None
    assert model.limit is not None
    # 36 ms expected and 10 ms at the limit, as `ostrya capacity` has it for this batch.
    plan = sized_plan([32_769] * 64)
    assert model.limit.limit(plan).seconds == pytest.approx(10.0e-3, rel=0.01)
    assert runner._model.seconds(plan).seconds == pytest.approx(36.0e-3, rel=0.01)


def test_what_cannot_be_simulated_is_refused_with_a_remedy() -> None:
    with pytest.raises(DoesNotFit, match=r"needs .* GB of tpu7x-8's .* GB usable: \d+ bytes too many; tpu7x-16 would"):
        load_runner(msgspec.structs.replace(CONFIG, model_path="kimi-k3", slice="tpu7x-8"))
    with pytest.raises(ConfigError, match="model 'kimi' is not known"):
        load_runner(msgspec.structs.replace(CONFIG, model_path="kimi"))
    with pytest.raises(ConfigError, match="max_context_tokens is 131073; the model allows 1 to 131072"):
        load_runner(msgspec.structs.replace(CONFIG, max_context_tokens=131_073))
