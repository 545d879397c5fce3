"""Our side: the whole engine (scheduler, prefix cache, runner) in one process. No two calls share a prefix unless
their prompts do.

Arguments: the .gguf file, the weights' type, threads.
"""

from itertools import count

import msgspec

from ostrya.engine.backends.cpu import load_runner
from ostrya.engine.config import EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.types import EngineRequest, RequestId, Sampling
from tests.bench.answering import Generate, answer


def weights_setting(weights: str) -> dict[str, str]:
    """The engine's settings for one kind of weights."""
    return {"dtype": "float32" if weights == "f32" else "bfloat16", "weights": weights}


def load(arguments: list[str]) -> Generate:
    gguf, weights, threads = arguments
    plain = {"model_path": gguf, "model_name": "bench", "tokenizer_fingerprint": "", "num_threads": int(threads)}
    config = msgspec.convert({**plain, **weights_setting(weights)}, EngineConfig)
    runner, model = load_runner(config)
    engine = Engine(runner, config, context_tokens=model.context_tokens, eos_token_ids=config.eos_token_ids)
    engine.warm_up()
    ids = map(str, count())

    def generate(prompts: list[list[int]], num_new: int) -> None:
        """Submits all prompts at once and runs the engine dry."""
        sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=num_new, ignore_eos=True)
        for prompt in prompts:
            engine.submit(EngineRequest(request_id=RequestId(next(ids)), token_ids=prompt, sampling=sampling))
        num_tokens = 0
        while report := engine.step():
            num_tokens += sum(len(output.token_ids) for output in report.outputs)
        assert num_tokens == len(prompts) * num_new

    return generate


if __name__ == "__main__":
    answer(load)
