"""The side of vLLM on CPUs: its offline LLM, eager, without a prefix cache. Runs in its own venv.

Arguments: a Hugging Face directory, threads.
"""

import os

from tests.bench.answering import Generate, answer

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    # With "uni" below one process: its engine and worker processes poll even when idle, a third of a core, and hold up
    # their own two threads on two cores.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CONTEXT_TOKENS, MAX_RUNNING = 4096, 16


def load(arguments: list[str]) -> Generate:
    directory, threads = arguments
    # Read when it is imported. Bound, as its manual advises: it leaves a core unused otherwise.
    bind = f"0-{int(threads) - 1}"
    os.environ.update(SETTINGS, VLLM_CPU_OMP_THREADS_BIND=bind, OMP_NUM_THREADS=threads)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=directory,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=MAX_RUNNING,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
    )

    def generate(prompts: list[list[int]], num_new: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
        assert all(len(one.outputs[0].token_ids) == num_new for one in answers)

    return generate


if __name__ == "__main__":
    answer(load)
