"""The engine stops where the text side says that a turn ends, whatever the weights' file calls its end."""

import socket
from pathlib import Path

import pytest

from ostrya.engine import child, wire
from ostrya.engine.config import EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.types import EngineRequest, FinishReason, RequestId, Sampling
from ostrya.errors import ModelLoadError
from ostrya.text.tokenizer import load_tokenizer
from tests.unit.engine.models.checkpoints import MetadataValue, Tiny, write_gguf
from tests.unit.text.test_turns import CHATML

TINY = Tiny(num_layers=1)
PROMPT = [5, 6, 7]


def loaded(path: Path, eos_token_ids: tuple[int, ...]) -> tuple[Engine, tuple[int, ...]]:
    config = EngineConfig(
        model_path=str(path),
        model_name="tiny",
        tokenizer_fingerprint="",
        eos_token_ids=eos_token_ids,
        dtype="float32",
        num_pages=9,
        max_running=4,
        max_step_tokens=16,
        num_threads=1,
    )
    with socket.socket() as nobody:
        start = wire.Start(config, "ostrya.engine.backends.cpu:load_runner")
        engine, info = child._load(start, child.Parent(nobody))
    return engine, info.eos_token_ids


def answer(path: Path, eos_token_ids: tuple[int, ...]) -> tuple[list[int], FinishReason | None]:
    """At most 12 tokens, the likeliest ones."""
    engine, told = loaded(path, eos_token_ids)
    assert told == eos_token_ids
    sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=12)
    engine.submit(EngineRequest(request_id=RequestId("r"), token_ids=PROMPT, sampling=sampling))
    token_ids: list[int] = []
    reason = None
    while report := engine.step():
        for output in report.outputs:
            token_ids += output.token_ids
            reason = output.finish_reason
    engine._runner.close()
    return token_ids, reason


def named_by(path: Path, document_end: int, turn_end: int) -> Path:
    """Its eos is the base model's; only its template, and the text of a control token, tell where a turn ends."""
    tokens = [f"word{i}" for i in range(TINY.vocab_size)]
    kinds = [1] * TINY.vocab_size
    for token_id, text in {document_end: "<|endoftext|>", turn_end: "<|im_end|>"}.items():
        tokens[token_id], kinds[token_id] = text, 3
    ordinary = [token_id for token_id, kind in enumerate(kinds) if kind == 1]
    for token_id, text in zip(ordinary, ("a", "b", "ab"), strict=False):
        tokens[token_id] = text
    changed: dict[str, MetadataValue] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": document_end,
        "tokenizer.chat_template": CHATML,
    }
    return write_gguf(path, TINY, TINY.weights(), changed=changed)


def test_a_turn_ends_where_the_template_ends_it_though_the_file_names_another_token(tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "plain.gguf", TINY, TINY.weights())
    written, reason = answer(plain, ())
    assert (len(written), reason) == (12, FinishReason.LENGTH)
    turn_end = written[5]
    never = next(token_id for token_id in range(3, TINY.vocab_size) if token_id not in written)
    path = named_by(tmp_path / "m.gguf", document_end=never, turn_end=turn_end)
    eos_token_ids = load_tokenizer(path).eos_token_ids
    assert eos_token_ids == (never, turn_end)
    assert answer(path, eos_token_ids) == (written[: written.index(turn_end) + 1], FinishReason.STOP)


def test_an_end_beyond_the_models_ids_is_refused_at_load(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, TINY.weights())
    with pytest.raises(ModelLoadError, match=r"m\.gguf: a turn ends with token 96, but the model's ids end at 95"):
        loaded(path, (2, 96))
