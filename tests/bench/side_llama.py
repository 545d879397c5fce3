"""The side of llama.cpp: its C interface, as its own benchmark uses it, on the quantized file. Runs in its own venv.

Arguments: the .gguf file, threads.
"""

from collections.abc import Sequence
from functools import cache

import llama_cpp as llama

from tests.bench.answering import Generate, answer

MAX_BATCH_TOKENS = 2048


def load(arguments: list[str]) -> Generate:
    gguf, threads = arguments
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(gguf.encode(), llama.llama_model_default_params())
    sampler = llama.llama_sampler_init_greedy()
    batch = llama.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
    print(llama.llama_print_system_info().decode())

    @cache
    def context(num_prompts: int, num_tokens: int) -> llama.llama_context_p:
        """Cached: to make one takes long."""
        params = llama.llama_context_default_params()
        params.n_seq_max, params.n_ctx = num_prompts, num_prompts * num_tokens
        params.n_batch = MAX_BATCH_TOKENS
        params.n_threads = params.n_threads_batch = int(threads)
        return llama.llama_init_from_model(model, params)

    def decode(ctx: llama.llama_context_p, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Rows: token, position, sequence, whether its logits are wanted."""
        assert len(rows) <= MAX_BATCH_TOKENS
        for at, (token, position, sequence, is_last) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, is_last
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        batch.n_tokens = len(rows)
        assert llama.llama_decode(ctx, batch) == 0

    def generate(prompts: list[list[int]], num_new: int) -> None:
        length = len(prompts[0])
        ctx = context(len(prompts), -(-(length + num_new) // 256) * 256)
        llama.llama_memory_clear(llama.llama_get_memory(ctx), False)
        rows = [
            (token, at, sequence, at == length - 1)
            for sequence, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
        ]
        decode(ctx, rows)
        tokens = [llama.llama_sampler_sample(sampler, ctx, at) for at in range(length - 1, len(rows), length)]
        for position in range(length, length + num_new - 1):
            decode(ctx, [(token, position, sequence, True) for sequence, token in enumerate(tokens)])
            tokens = [llama.llama_sampler_sample(sampler, ctx, at) for at in range(len(tokens))]

    return generate


if __name__ == "__main__":
    answer(load)
