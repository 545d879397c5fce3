"""The real tokenizer of SmolLM2, loaded once."""

import os

import pytest

from ostrya.errors import ModelLoadError
from ostrya.text.source import resolve_model
from ostrya.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    try:
        source = resolve_model("smollm2-135m-instruct")
    except ModelLoadError as error:
        if os.environ.get("OSTRYA_REQUIRE_ALL") == "1":
            raise
        pytest.skip(str(error))
    return load_tokenizer(source.path)
