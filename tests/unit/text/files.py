"""Tokenizers as files, made small: GGUF metadata without weights, and Hugging Face directories."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ORDINARY = (*"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "Ċ", "ab")
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def write_gguf(
    path: Path,
    *,
    kind: str = "gpt2",
    tokens: Sequence[str] = ORDINARY,
    control: Sequence[str] = (),
    user_defined: Collection[str] = (),
    pre: str | None = "gpt-2",
    merges: Sequence[str] = ("a b",),
    template: str | None = None,
    ids: Mapping[str, int | str | float | bool] | None = None,
    has_types: bool = True,
) -> Path:
    """`control` and `user_defined` tokens follow the ordinary ones. `ids`: eos -> a token, or whatever shall stand
    there instead of its id."""
    everything = [*tokens, *control, *user_defined]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(everything)
    kinds = [_NORMAL] * len(tokens) + [_CONTROL] * len(control) + [_USER_DEFINED] * len(user_defined)
    if has_types:
        writer.add_token_types(kinds)
    writer.add_token_merges(list(merges))
    for name, value in (ids or {}).items():
        key = f"tokenizer.ggml.{name}_token_id"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_int32(key, value)
        else:
            writer.add_uint32(key, everything.index(value))
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_sentence_pieces(
    path: Path,
    pieces: Mapping[str, float],
    *,
    user_defined: Sequence[str] = (),
    with_bytes: bool = True,
    space_prefix: bool | None = None,
    without: Collection[str] = (),
    template: str | None = None,
) -> Path:
    """A SentencePiece GGUF: <unk>, <s> and </s> (0 to 2), bytes (3 to 258), `user_defined`, and pieces with scores.

    `without`: keys that are left out, of scores and token_type.
    """
    spelled = [f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []
    rows = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    rows += [(token, 0.0, 6) for token in spelled]
    rows += [(token, -1000.0, _USER_DEFINED) for token in user_defined]
    rows += [(token, score, _NORMAL) for token, score in pieces.items()]
    tokens, scores, kinds = zip(*rows, strict=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    if "scores" not in without:
        writer.add_token_scores(scores)
    if "token_type" not in without:
        writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if space_prefix is not None:
        writer.add_add_space_prefix(space_prefix)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_directory(
    folder: Path, *, special: Sequence[str] = (), plain: Sequence[str] = (), files: Mapping[str, object]
) -> Path:
    """tokenizer.json of ORDINARY tokens and those added, and `files` (without .json) as they are given."""
    folder.mkdir(exist_ok=True)
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(ORDINARY)}, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in {"config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
