import sys
from pathlib import Path

import pytest

from ostrya.cli.startup import near, ostrya_command


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation whose script is tmp_path/env/bin/ostrya; PATH is empty, the working directory tmp_path."""
    script = tmp_path / "env" / "bin" / "ostrya"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return script


def test_the_command_is_a_word_where_path_has_this_installation(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(installed.parent))
    assert ostrya_command() == "ostrya"


def test_the_command_is_a_path_where_path_has_none_or_another(installed: Path, tmp_path: Path) -> None:
    assert ostrya_command() == "env/bin/ostrya"
    (tmp_path / "ostrya").touch(mode=0o755)
    assert ostrya_command() == "env/bin/ostrya"


def test_the_command_is_absolute_outside_the_working_directory(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(installed.parent)
    assert near(installed.parents[2] / "else where") == f"'{installed.parents[2]}/else where'"


def test_without_a_script_the_module_is_run(installed: Path) -> None:
    installed.unlink()
    assert ostrya_command() == "env/bin/python -m ostrya.cli.main"
