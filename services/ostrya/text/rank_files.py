"""tiktoken's rank files: a token's bytes in base64 and its rank a line, better ones first.

How a text is split before merging, and what the special tokens are, stands in the model's own Python, which is not run:
so the vocabulary is recognised for certain, or refused. Called by formats.py.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from ostrya.errors import ModelLoadError
from ostrya.text.pieces import byte_level, merges_by_piece, spell
from ostrya.text.pre_tokenizers import pre_named, recognised

_RESERVED = {"kimi-k2": "<|reserved_token_{}|>"}
"""What the code of the models that have such a file calls the special tokens that `tokenizer_config.json` does not."""

_MAX_SPECIAL = 1 << 16
"""Kimi K2 has 256."""


@dataclass(frozen=True, slots=True)
class Named:
    """A special token as `tokenizer_config.json` has it."""

    text: str
    special: bool
    """Whether it is left out of a text."""


def from_ranks(file: Path, named: Mapping[int, Named], num_ids: int) -> Tokenizer:
    """A backend; `named` are the special tokens that are known by id, and `num_ids` is how many ids the model has.

    ModelLoadError if the file cannot be read, or is of no known vocabulary.
    """
    ranks = _ranks(file)
    if not 0 <= num_ids - len(ranks) <= _MAX_SPECIAL:
        raise ModelLoadError(f"{file}: vocab_size of config.json is {num_ids}, and the file has {len(ranks)} ranks")
    for token_id, token in named.items():
        if not len(ranks) <= token_id < num_ids:
            what = f"special token {token.text[:64]!r} of tokenizer_config.json has id {token_id}"
            raise ModelLoadError(f"{file}: {what}; special ones have ids from {len(ranks)} to {num_ids - 1}")
    family = recognised([*ranks, *(named[i].text if i in named else "" for i in range(len(ranks), num_ids))])
    if family not in _RESERVED:
        raise ModelLoadError(
            f"{file}: its {len(ranks)} ranks and the special tokens of tokenizer_config.json are none of the "
            f"vocabularies known in this form ({', '.join(_RESERVED)}); put the model's tokenizer.json beside it"
        )
    vocab = {token: rank for rank, token in enumerate(ranks)}
    backend = byte_level(vocab, merges_by_piece(vocab), pre_named(family))
    reserved = (Named(_RESERVED[family].format(token_id), special=True) for token_id in range(len(ranks), num_ids))
    tokens = [named.get(token_id, unnamed) for token_id, unnamed in enumerate(reserved, start=len(ranks))]
    backend.add_tokens([AddedToken(token.text, special=token.special, normalized=False) for token in tokens])
    if backend.get_vocab_size(with_added_tokens=True) != num_ids:
        raise ModelLoadError(f"{file}: a token stands there twice, or again in tokenizer_config.json")
    return backend


def _ranks(file: Path) -> list[str]:
    """The tokens, as byte-level BPE spells them."""
    tokens: list[str] = []
    try:
        for number, line in enumerate(file.read_bytes().splitlines()):
            encoded, rank = line.split()
            if int(rank) != number:
                raise ModelLoadError(f"{file}: line {number + 1} has rank {int(rank)}; ranks go up by one from 0")
            tokens.append(spell(base64.b64decode(encoded, validate=True)))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} is no file of ranks: line {len(tokens) + 1}: {error}") from error
    if missing := {spell(bytes([byte])) for byte in range(256)} - set(tokens):
        raise ModelLoadError(f"{file} has no rank for {len(missing)} of the 256 bytes; it is cut short or damaged")
    return tokens
