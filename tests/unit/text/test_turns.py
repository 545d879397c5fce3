"""What ends a turn is found wherever a model's files have it, and nothing else ends one."""

from pathlib import Path

import pytest

from ostrya.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text.files import write_directory, write_gguf

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
PHI3 = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"
GLM4 = "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}<|assistant|>"
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + '<|fin|>' }}{% endif %}{% endfor %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
)
DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")


def texts(tokenizer: Tokenizer) -> list[str]:
    return [str(tokenizer._backend.id_to_token(token_id)) for token_id in tokenizer.eos_token_ids]


@pytest.mark.parametrize(
    ("template", "control", "eos", "expected"),
    [
        (CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
        (None, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
        (
            LLAMA3,
            ("<|begin_of_text|>", "<|end_of_text|>", *HEADERS),
            "<|end_of_text|>",
            ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"],
        ),
        (GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", ["<eos>", "<end_of_turn>"]),
        (
            PHI3,
            ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
            "<|endoftext|>",
            ["<|endoftext|>", "<|end|>"],
        ),
        (GLM4, ("<|endoftext|>", "<sop>", "<|user|>", "<|assistant|>"), "<|endoftext|>", ["<|endoftext|>"]),
        (GLM4, ("<|endoftext|>", "<sop>", "<|user|>", "<|assistant|>"), "<|user|>", ["<|user|>", "<|endoftext|>"]),
        (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", ["</s>"]),
        (LLAMA2, ("<s>", "</s>", "<|fin|>"), "</s>", ["</s>", "<|fin|>"]),
        (None, ("<s>", DEEPSEEK_END), "<s>", ["<s>", DEEPSEEK_END]),
        (
            HARMONY,
            ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
            "<|return|>",
            ["<|return|>", "<|call|>"],
        ),
        ("{{ raise_exception('no') }}", ("</s>", "<|over|>"), "</s>", ["</s>"]),
        ("{% for %}", ("</s>", "<|im_end|>"), "</s>", ["</s>", "<|im_end|>"]),
        ("{{ 1 / 0 }}", ("</s>", "<|over|>"), "</s>", ["</s>"]),
    ],
    ids=range(14),
)
def test_the_end_of_a_turn_is_known_by_file_by_text_and_by_template(
    tmp_path: Path, template: str | None, control: tuple[str, ...], eos: str, expected: list[str]
) -> None:
    ids = {"eos": eos, "bos": control[0]}
    path = write_gguf(tmp_path / "m.gguf", control=control, template=template, ids=ids)
    assert texts(load_tokenizer(path)) == expected


def test_a_gguf_names_three_ends(tmp_path: Path) -> None:
    ids = {"eos": "<1>", "eot": "<2>", "eom": "<3>"}
    path = write_gguf(tmp_path / "m.gguf", control=("<1>", "<2>", "<3>", "<4>"), ids=ids)
    assert texts(load_tokenizer(path)) == ["<1>", "<2>", "<3>"]


def test_tool_call_markers_and_text_that_only_looks_like_an_end_end_nothing(tmp_path: Path) -> None:
    control = ("<|endoftext|>", "<tool_call>", "</tool_call>", "<|im_start|>")
    tokens = ("a", "b", "ab", "<|im_end|>")
    path = write_gguf(tmp_path / "m.gguf", tokens=tokens, control=control, template=CHATML, ids={"eos": control[0]})
    assert texts(load_tokenizer(path)) == ["<|endoftext|>"], "its <|im_end|> is a plain token, which a text may hold"


@pytest.mark.parametrize(("template", "expected"), [(CHATML, ["</s>", "<|im_end|>"]), (None, ["</s>"])])
def test_a_user_defined_token_ends_a_turn_only_where_the_template_says_so(
    tmp_path: Path, template: str | None, expected: list[str]
) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        control=("</s>",),
        user_defined=("<|im_start|>", "<|im_end|>"),
        template=template,
        ids={"eos": "</s>"},
    )
    assert texts(load_tokenizer(path)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": 39}}, ["<|endoftext|>", "<|im_end|>"]),
        (
            {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 41}},
            ["<over>", "<|endoftext|>", "<|im_end|>"],
        ),
        (
            {"generation_config": {"eos_token_id": [41, 39]}, "config": {"eos_token_id": None}},
            ["<over>", "<|endoftext|>", "<|im_end|>"],
        ),
        ({"tokenizer_config": {"eos_token": {"content": "<over>"}}}, ["<over>", "<|endoftext|>", "<|im_end|>"]),
    ],
    ids=range(4),
)
def test_a_directory_is_the_union_of_its_files_and_its_template(
    tmp_path: Path, files: dict[str, dict[str, object]], expected: list[str]
) -> None:
    settings = {"chat_template": CHATML} | files.get("tokenizer_config", {})
    special = ("<|endoftext|>", "<|im_end|>", "<over>", "<|im_start|>")
    folder = write_directory(tmp_path / "m", special=special, files=files | {"tokenizer_config": settings})
    assert texts(load_tokenizer(folder)) == expected
