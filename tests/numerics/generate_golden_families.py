"""Writes golden_families.json: the greedy tokens of `transformers` in float32 on small random models of each family.
Runs in the peer venv (make golden)."""

import argparse
import importlib.metadata
import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.numerics.generate_golden import greedy
from tests.numerics.tiny_families import FAMILIES, NUM_NEW, PROMPTS

GOLDEN = Path(__file__).with_name("golden_families.json")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    families = {}
    for name, family in FAMILIES.items():
        with tempfile.TemporaryDirectory() as directory:
            family.write(Path(directory))
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        cases = []
        for prompt in PROMPTS:
            output, margin = greedy(model, prompt, num_new=NUM_NEW)
            cases.append({"output": output, "min_margin": margin})
        families[name] = cases
        print(name, *(f"{case['min_margin']:.1e}" for case in cases), cases[-1]["output"], flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    GOLDEN.write_text(json.dumps({"versions": versions, "families": families}) + "\n")


if __name__ == "__main__":
    main()
