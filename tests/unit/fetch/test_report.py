"""Reports cross from one process to another through files, and a bad one hurts nobody."""

import logging
from pathlib import Path

import pytest

from ostrya.fetch.report import StartReport, read, write

MODEL = StartReport(phase="fetch_model", result="miss", seconds=2.5, bytes=10)
CACHE = StartReport(phase="fetch_compile_cache", result="hit", seconds=0.1, bytes=3)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    for report in (CACHE, MODEL, MODEL):
        write(directory, report)
    assert read(directory) == [MODEL, CACHE]
    assert sorted(path.name for path in directory.iterdir()) == ["fetch_compile_cache.json", "fetch_model.json"]


def test_no_directory_means_no_reports(tmp_path: Path) -> None:
    assert read(tmp_path / "absent") == []


@pytest.mark.parametrize("content", ["{", '{"phase": "fetch_model", "result": "maybe", "seconds": 1, "bytes": 0}'])
def test_a_report_that_cannot_be_read_is_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    write(tmp_path, CACHE)
    (tmp_path / "fetch_model.json").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path) == [CACHE]
    assert "start report cannot be read" in caplog.text
