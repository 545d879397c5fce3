"""Runs the GKE guide's shell blocks with stand-ins for gcloud, kubectl, helm, docker and ostrya, which record calls.

The blocks, the script node-pools.sh and bash are the real ones. What the calls would need and make is for cloud.py.
"""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.waiting import until
from tests.unit.deploy.images import ROOT

ANSWERS = {"BILLING_ACCOUNT": "0A0A0A-BBBBBB-CCCCCC", "TORCH_INDEX": "https://index.test/cpu", "MODEL_DIRECTORY": "/m"}
"""What is typed at each `read`, in the order of the guide."""
PROJECT_NUMBER = "123456789"
_PROGRAMS = ("gcloud", "kubectl", "helm", "docker", "ostrya")
_STAND_IN = f"""\
#!/bin/bash
printf '%s\\x1f' "${{0##*/}}" "$@" $'\\x1e' >> "$CALLS"
case "${{0##*/}} $*" in
  "gcloud projects describe"*) echo {PROJECT_NUMBER} ;;
  # A failed describe is how gcloud says that there is none.
  "gcloud compute resource-policies describe"*) exit 1 ;;
  "gcloud container node-pools list"*--filter*) printf '%s\\n' $NODE_POOLS ;;
  "kubectl get pods"*"--output name"*) printf 'pod/%s\\n' router-0 router-1 ;;
  "kubectl port-forward"*) echo "Forwarding from 127.0.0.1:50051 -> 50051"; exec sleep 30 2>/dev/null ;;
esac
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    program: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([self.program, *self.words])

    def begins(self, *words: str) -> bool:
        return self.words[: len(words)] == words

    def flag(self, name: str) -> str:
        """Given as --name=value or --name value; empty without it."""
        for position, word in enumerate(self.words):
            if word == name:
                return self.words[position + 1]
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return ""

    def flags(self, name: str) -> list[str]:
        """The values of a flag that is given several times, each as a word of its own."""
        return [self.words[position + 1] for position, word in enumerate(self.words) if word == name]


def rehearse(
    folder: Path, blocks: Iterable[str], *, node_pools: str = "", pasted: bool = False, **environment: str
) -> list[Call]:
    """The calls of the blocks, run in one shell after the other. AssertionError if a line of them fails, or leaves
    something running.

    `pasted` runs them as an interactive shell does, which goes on after a failed line.
    """
    stage(folder)
    calls = folder / "calls"
    calls.write_text("")
    script = "\n".join(blocks)
    settings = {
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder), "CALLS": str(calls),
        "NODE_POOLS": node_pools, **environment,
    }  # fmt: skip
    command = ["bash", "--norc", "-i"] if pasted else ["bash", "-eu", "-c", script]
    typed = script if pasted else "\n".join([*ANSWERS.values(), ""])
    shell = subprocess.Popen(
        command, cwd=folder, env=settings, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    _, said = shell.communicate(typed, timeout=60)
    assert pasted or (shell.returncode, said) == (0, ""), said
    try:
        asyncio.run(until(lambda: not _runs(shell.pid)))
    finally:
        if _runs(shell.pid):
            os.killpg(shell.pid, signal.SIGKILL)
    return list(_read(calls.read_text()))


def stage(folder: Path) -> None:
    """A checkout as the guide's commands see it, and the stand-ins."""
    programs = folder / "bin"
    shutil.rmtree(programs, ignore_errors=True)
    programs.mkdir()
    for name in _PROGRAMS:
        (programs / name).write_text(_STAND_IN)
        (programs / name).chmod(0o755)
    for name, target in (("deploy", ROOT / "deploy"), ("helm", ROOT / "helm"), (".venv", folder)):
        if not (folder / name).exists():
            (folder / name).symlink_to(target)


def _runs(group: int) -> bool:
    """Whether the shell left something running."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _read(text: str) -> Iterator[Call]:
    for record in text.split("\x1e\x1f")[:-1]:
        program, *words = record.removesuffix("\x1f").split("\x1f")
        yield Call(program=program, words=tuple(words))
