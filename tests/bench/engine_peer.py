"""The peer's side of tests.bench.engine: runs in the peer venv, answers one JSON request a line on stdin with one on
stdout.

{"dtype", "prompts", "num_new"} -> {"seconds"}; uses model.generate as users do,
end-of-sequence off.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def timed_generate(model: PreTrainedModel, prompts: torch.Tensor, num_new: int) -> float:
    started = time.perf_counter()
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert out.shape[1] == prompts.shape[1] + num_new
    return time.perf_counter() - started


def main() -> None:
    directory, file, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    models = {
        dtype: AutoModelForCausalLM.from_pretrained(directory, gguf_file=file, dtype=getattr(torch, dtype)).eval()
        for dtype in ("float32", "bfloat16")
    }
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompts = torch.tensor(request["prompts"])
        with torch.inference_mode():
            answer = {"seconds": timed_generate(models[request["dtype"]], prompts, request["num_new"])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
