"""What structured output adds to a step: eight answers with a form beside eight without, turn by turn in one engine.

The answers run to the end of their tokens: each form allows that many. Run by `make bench-forms`.
"""

import argparse
import json
import statistics
import time
from itertools import count, pairwise

import msgspec

from ostrya.engine.backends.cpu import load_runner
from ostrya.engine.config import EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.grammar import Grammars
from ostrya.engine.types import EngineRequest, Grammar, RequestId, Sampling
from ostrya.text.packaged import packaged_file
from ostrya.text.tokenizer import load_tokenizer
from tests.bench.rounds import prompts

MODEL = "smollm2-135m-instruct"
BATCH, PROMPT_TOKENS, NUM_NEW = 8, 128, 48
GOAL_RATIO = 1.10
PLAIN = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=NUM_NEW, ignore_eos=True)
STRINGS = {"type": "array", "items": {"type": "string", "minLength": 8}, "minItems": 60}
FORMS: dict[str, Grammar | None] = {
    "none": None,
    "JSON schema, strings": Grammar(kind="json_schema", text=json.dumps(STRINGS)),
    "regex, words": Grammar(kind="regex", text="([a-z]+ ){200}"),
    "regex, anything": Grammar(kind="regex", text="(?s:.{2000})"),
    "Lark, brackets": Grammar(kind="lark", text='start: ("(" start ")")+ | /[a-z]{9,}/ start'),
}


class Bench:
    def __init__(self, threads: int) -> None:
        path = packaged_file(MODEL)
        plain = EngineConfig(model_path=str(path), model_name="bench", tokenizer_fingerprint="", num_threads=threads)
        runner, model = load_runner(plain)
        self._engine = Engine(runner, plain, context_tokens=model.context_tokens, eos_token_ids=())
        self._engine.warm_up()
        self._grammars = Grammars(load_tokenizer(path).vocabulary(), eos_token_ids=(0,))
        self._ids = map(str, count())

    def step_s(self, form: Grammar | None, *, salt: int) -> float:
        """Of decoding, in the median; the first tokens are not counted."""
        for prompt in prompts(BATCH, PROMPT_TOKENS, salt=salt):
            matcher = None if form is None else self._grammars.compile(form)
            sampling = msgspec.structs.replace(PLAIN, grammar=form)
            request = EngineRequest(request_id=RequestId(next(self._ids)), token_ids=prompt, sampling=sampling)
            self._engine.submit(request, matcher)
        ends = []
        while report := self._engine.step():
            if sum(len(output.token_ids) for output in report.outputs) == BATCH:
                ends.append(time.perf_counter())
        return statistics.median(after - before for before, after in pairwise(ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    bench = Bench(asked.threads)
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    for number in range(asked.rounds):
        for name in FORMS if number % 2 else reversed(FORMS):
            times[name].append(bench.step_s(FORMS[name], salt=number))
    all_hold = True
    print(f"a step of {BATCH} rows, medians of {asked.rounds} rounds")
    for name, seconds in times.items():
        ratio = statistics.median(form / plain for form, plain in zip(seconds, times["none"], strict=True))
        all_hold &= ratio <= GOAL_RATIO
        print(f"  {name:24} {statistics.median(seconds) * 1e3:6.1f} ms  {ratio:5.2f} x  (goal {GOAL_RATIO})")
    raise SystemExit(not all_hold)


if __name__ == "__main__":
    main()
