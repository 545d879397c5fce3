"""The Dockerfile reader of tests/ops reads what Docker reads, and refuses what it does not know."""

from pathlib import Path, PurePosixPath

import pytest

from tests.ops.dockerfile import context, ignored, parse

TEXT = """\
# A comment.
ARG BASE=python:3.11

FROM ${BASE} AS build
ARG INDEX
ARG VERSION=1
ENV ONE=1 \\
    # A comment between continuation lines is no line.
    TWO="two words" \\
    BOTH=${VERSION}-${INDEX}
COPY --from=other a b c/
RUN first \\
 && second

FROM $BASE
USER 1:1
USER 65532:65532
ENTRYPOINT ["ostrya", "router"]
"""


def test_continuation_lines_are_one_instruction_that_knows_where_it_began() -> None:
    run = parse(TEXT).stages[0].last("RUN")
    assert (run.line, run.text) == (12, "first && second")


def test_stages_have_their_names_and_bases() -> None:
    assert [(one.name, one.base) for one in parse(TEXT).stages] == [("build", "python:3.11"), ("1", "python:3.11")]


def test_variables_are_put_in_and_unset_ones_are_empty() -> None:
    assert parse(TEXT).stages[0].pairs("ENV") == {"ONE": "1", "TWO": "two words", "BOTH": "1-"}


def test_the_last_of_several_counts() -> None:
    assert parse(TEXT).final.last("USER").text == "65532:65532"


def test_flags_and_operands_are_told_apart() -> None:
    copy = parse(TEXT).stages[0].last("COPY")
    assert (copy.flags(), copy.operands()) == ({"from": "other"}, ["a", "b", "c/"])


def test_only_a_json_array_needs_no_shell() -> None:
    file = parse(TEXT)
    assert file.final.last("ENTRYPOINT").exec_form() == ["ostrya", "router"]
    assert file.stages[0].last("RUN").exec_form() is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("FROM a\nADD b c\n", "line 2: ADD"),
        ("RUN a\nFROM b\n", "line 1: RUN before the first FROM"),
        ("FROM a\nRUN b \\\n", "line 2: ends in a continuation"),
        ("# nothing\n", "no FROM"),
    ],
)
def test_what_it_does_not_know_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_the_last_rule_of_dockerignore_that_matches_decides() -> None:
    rules = "*\n!services\n**/*.pyc\n**/__pycache__\n"
    assert ignored(PurePosixPath(".venv/bin/python"), rules)
    assert not ignored(PurePosixPath("services/ostrya/errors.py"), rules)
    assert ignored(PurePosixPath("services/ostrya/errors.pyc"), rules)
    assert ignored(PurePosixPath("services/ostrya/__pycache__/errors.txt"), rules)


def test_a_folder_brings_its_files_without_what_is_ignored(tmp_path: Path) -> None:
    for name in ("services/a.py", "services/a.pyc", "secret"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / ".dockerignore").write_text("*\n!services\n**/*.pyc\n")
    assert list(context(tmp_path, "services")) == [Path("services/a.py")]
    assert list(context(tmp_path, "secret")) == []
