"""What is wrong with an installation, or with where programs are kept, is known before torch_xla is imported."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from ostrya.engine.backends import xla_cache, xla_versions

INSTALL = "pip install 'ostrya[xla]' in a venv of its own (torch==2.9.*, torch_xla==2.9.0)"


@pytest.mark.parametrize(
    ("torch", "torch_xla", "problem"),
    [
        ("2.9.1+cpu", "2.9.0", None),
        ("2.13.0", None, "backend xla needs torch_xla, which is not installed"),
        ("2.13.0", "2.9.0", "torch 2.13.0 and torch_xla 2.9.0 do not fit"),
        ("2.90.0", "2.9.0", "torch 2.90.0 and torch_xla 2.9.0 do not fit"),
        ("2.8.0", "2.8.0", "torch 2.8.0 and torch_xla 2.8.0 do not fit"),
        (None, "2.9.0", "torch (none) and torch_xla 2.9.0 do not fit"),
    ],
)
def test_a_pair_that_does_not_fit_is_one_line(
    monkeypatch: pytest.MonkeyPatch, torch: str | None, torch_xla: str | None, problem: str | None
) -> None:
    installed = {"torch": torch, "torch_xla": torch_xla}

    def version(name: str) -> str:
        if (found := installed.get(name)) is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr("importlib.metadata.version", version)
    assert xla_versions.installation_problem() == (problem and f"{problem}; {INSTALL}")


def test_each_identity_has_a_directory_of_its_own_that_says_whose_it_is(tmp_path: Path) -> None:
    one, same, other = (
        xla_cache.cache_directory(str(tmp_path), {"torch_xla": "2.9.0", "flags": flags}).path
        for flags in ("", "", "--fast")
    )
    assert one is not None
    assert one == same != other
    assert json.loads((one / "identity.json").read_text()) == {"torch_xla": "2.9.0", "flags": ""}


def test_a_cache_that_cannot_be_written_is_said_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = xla_cache.cache_directory(str(tmp_path / "file"), {})
    assert found.path is None
    assert found.problem == (
        f"compile cache {tmp_path}/file cannot be written (Not a directory); every start compiles anew"
    )
    assert xla_cache.cache_directory("", {}) == xla_cache.CacheDirectory(None)
