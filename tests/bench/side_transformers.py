"""The side of transformers: model.generate as users call it, end-of-sequence off. Runs in its own venv.

Arguments: the .gguf file, bf16 or f32, threads; or `--export`, the .gguf file and a directory, which gets the weights
in bfloat16 for a peer that reads no GGUF.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.bench.answering import Generate, answer


def read(gguf: str, dtype: torch.dtype) -> PreTrainedModel:
    """Dequantizes; the values are those that all sides with this dtype compute with."""
    path = Path(gguf)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    return model.eval()


def export(gguf: str, directory: str) -> None:
    model = read(gguf, torch.bfloat16)
    # It remembers what it was read from, and would refuse.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(directory)


def load(arguments: list[str]) -> Generate:
    gguf, dtype, threads = arguments
    torch.set_num_threads(int(threads))
    model = read(gguf, {"bf16": torch.bfloat16, "f32": torch.float32}[dtype])

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_new: int) -> None:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.shape[1] == ids.shape[1] + num_new

    return generate


if __name__ == "__main__":
    if sys.argv[1] == "--export":
        export(sys.argv[2], sys.argv[3])
    else:
        answer(load)
