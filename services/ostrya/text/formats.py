"""Tokenizers as they are stored in a directory: Hugging Face's tokenizer.json, or tiktoken's rank file.

Both become a `tokenizers` backend and what goes with it. Called by tokenizer.py only.
"""

import json
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from tokenizers import Tokenizer

from ostrya.errors import ModelLoadError
from ostrya.text.rank_files import Named, from_ranks
from ostrya.text.source import rank_file

JsonValue = dict[str, "JsonValue"] | list["JsonValue"] | str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tokenizer as its files give it."""

    backend: Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """What the files name; what ends a turn is more: turns.py."""
    prefix_ids: tuple[int, ...]
    """What a plain prompt begins with, e.g. the begin-of-sequence token."""
    chat_template: str | None
    bos_token: str
    eos_token: str


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """For a message of one line, whatever a file holds."""
    return reprlib.repr(value)


def from_directory(path: Path) -> Stored:
    """The tokenizer of a Hugging Face directory. ModelLoadError if its files cannot be used."""
    config, generation, settings = (
        _json_file(path / name) for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    )
    file = path / "tokenizer.json"
    ranks = None if file.is_file() else rank_file(path)
    if ranks is None:
        backend, text = _from_json(file)
        vocab_size = _vocab_size(backend)
        num_ids = _num_ids(path / "config.json", config, vocab_size)
        _check_added(file, text, backend, num_ids)
    else:
        num_ids = _num_ids(path / "config.json", config, 0)
        backend = from_ranks(ranks, dict(_named(settings)), num_ids)
        vocab_size = _vocab_size(backend)
    bos, eos = (_token_text(settings.get(name)) for name in ("bos_token", "eos_token"))
    eos_id = backend.token_to_id(eos)
    eos_ids = [
        *_ids(path / "generation_config.json", generation, num_ids),
        *_ids(path / "config.json", config, num_ids),
        *([] if eos_id is None else [eos_id]),
    ]
    return Stored(
        backend=backend,
        vocab_size=vocab_size,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        prefix_ids=_prefix(file, backend, vocab_size),
        chat_template=_directory_template(path, settings),
        bos_token=bos,
        eos_token=eos,
    )


def _from_json(file: Path) -> tuple[Tokenizer, str]:
    """A backend, and the text it was read from."""
    try:
        text = file.read_text(encoding="utf-8")
        backend = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for a broken file
        raise ModelLoadError(f"{file} cannot be used: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend, text


def _vocab_size(backend: Tokenizer) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _named(settings: dict[str, JsonValue]) -> Iterator[tuple[int, Named]]:
    """The special tokens that tokenizer_config.json gives by id."""
    entries = settings.get("added_tokens_decoder")
    for token_id, entry in entries.items() if isinstance(entries, dict) else ():
        if token_id.isdecimal() and isinstance(entry, dict) and (text := _token_text(entry)):
            yield int(token_id), Named(text, special=entry.get("special") is not False)


def _num_ids(path: Path, config: dict[str, JsonValue], vocab_size: int) -> int:
    """How many token ids the model has: often more than its tokenizer knows."""
    value = config.get("vocab_size", vocab_size)
    if not is_int(value) or value < 1:
        raise ModelLoadError(f"{path}: vocab_size is {shown(value)}; it must be a positive number")
    return value


def _check_added(path: Path, text: str, backend: Tokenizer, num_ids: int) -> None:
    """The library numbers added tokens itself and says nothing where the file means another id."""
    for entry in _added_entries(text):
        content, token_id = entry.get("content"), entry.get("id")
        actual = backend.token_to_id(content) if isinstance(content, str) else None
        what = f"{path}: added token {shown(content)} has id {shown(token_id)}"
        if token_id != actual or not is_int(token_id):
            raise ModelLoadError(f"{what}, but ids without a gap would make it {actual}; save the tokenizer again")
        if token_id >= num_ids:
            raise ModelLoadError(
                f"{what}, and the model's ids end at {num_ids - 1} (vocab_size of config.json); remove the token, or "
                "resize the model's embedding"
            )


def _added_entries(text: str) -> Iterator[dict[str, JsonValue]]:
    """The added tokens of a tokenizer.json, without the time that reading all of its vocabulary again would take."""
    for found in re.finditer(r'"added_tokens"\s*:\s*(?=\[)', text):
        entries, _ = json.JSONDecoder().raw_decode(text, found.end())
        yield from (entry for entry in entries if isinstance(entry, dict))


def _json_file(path: Path) -> dict[str, JsonValue]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _token_text(entry: JsonValue) -> str:
    """A token is written as a string, or as an object with `content`."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else ""


def _ids(path: Path, config: dict[str, JsonValue], num_ids: int) -> Iterator[int]:
    entry = config.get("eos_token_id")
    for item in entry if isinstance(entry, list) else [] if entry is None else [entry]:
        if not is_int(item) or not 0 <= item < num_ids:
            wanted = f"token ids are whole numbers from 0 to {num_ids - 1}"
            raise ModelLoadError(f"{path}: eos_token_id is {shown(entry)}; {wanted}; correct it")
        yield item


def _prefix(path: Path, backend: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """What the post-processor puts before a text. What it puts after is left out: a prompt is to be continued."""
    whole, plain = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    if beyond := [token_id for token_id in whole[:start] if token_id >= vocab_size]:
        raise ModelLoadError(
            f"{path}: post_processor begins with id {beyond[0]}; the tokenizer's end at {vocab_size - 1}"
        )
    return tuple(whole[:start])


def _directory_template(path: Path, settings: dict[str, JsonValue]) -> str | None:
    beside = path / "chat_template.jinja"
    if beside.is_file():
        try:
            return beside.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{beside} cannot be read: {error}") from error
    entry = settings.get("chat_template")
    if isinstance(entry, list):
        named = (item for item in entry if isinstance(item, dict) and item.get("name") == "default")
        entry = next(named, {}).get("template")
    return entry if isinstance(entry, str) else None
