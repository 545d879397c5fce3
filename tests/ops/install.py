"""Does in a temporary tree what `docker build` would: COPY, RUN, COPY --from, with the Dockerfile's own lines.

There is no container: absolute paths of RUN lines are moved below the tree, and a line that names a path it may not
write to is refused. What this cannot show is the base image; its Python is this machine's.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.ops.dockerfile import Dockerfile, Instruction, Stage, argument, assignments, context, substitute

INSIDE = ("opt", "src", "wheels")
"""Top folders that a build may write to; they are moved below the tree."""
UID = 65532
_ABSOLUTE = re.compile(r"(?<![\w.:/-])/(?P<top>[\w.-]+)")
_PASSED_ON = re.compile(r"PIP_.*|SSL_.*|.*_CA_BUNDLE|LANG|LC_.*")


@dataclass(slots=True, kw_only=True)
class Built:
    """An image's file tree and what it says about running."""

    root: Path
    environment: Mapping[str, str]
    entrypoint: list[str]
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each RUN took, by its first words."""

    def command(self, *words: str) -> list[str]:
        """The entrypoint with arguments, as the image's user if this machine lets us be one."""
        program = str(self.root / "opt/ostrya/bin" / self.entrypoint[0])
        return [*as_nobody(self.root), program, *self.entrypoint[1:], *words]

    def size_bytes(self) -> int:
        """Of all files."""
        return sum(path.lstat().st_size for path in self.root.rglob("*") if not path.is_dir())


def as_nobody(root: Path) -> list[str]:
    """What to put before a command so that it runs as the image's user; nothing if we are not root or lack setpriv."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() or setpriv is None:
        return []
    identity = [setpriv, f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    # A Python below /root, say, is closed to others.
    python = str(root / "opt/ostrya/bin/python")
    tried = subprocess.run([*identity, python, "-c", ""], capture_output=True, check=False)
    return identity if tried.returncode == 0 else []


def base_python() -> Path:
    """A Python of the image's version, best one that every user may run."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in (Path("/usr/local/bin"), Path("/usr/bin")):
        python = folder / version
        has_venv = [str(python), "-c", "import ensurepip"]
        if python.exists() and subprocess.run(has_venv, capture_output=True, check=False).returncode == 0:
            return python
    return Path(sys.base_prefix) / "bin" / version


@contextmanager
def built(dockerfile: Dockerfile, project: Path, *, compiled: bool = True) -> Iterator[Built]:
    """Builds every stage; the tree is gone afterwards. RuntimeError with the output of a RUN that fails.

    An image that is only tried, not served from, need not be `compiled` to bytecode: a minute for the largest.
    """
    # Not pytest's folder: it is closed to other users.
    top = Path(tempfile.mkdtemp(prefix="ostrya-image-"))
    top.chmod(0o755)
    try:
        yield _Builder(top, project, {} if compiled else {"PIP_NO_COMPILE": "1"}).build(dockerfile)
    finally:
        shutil.rmtree(top)


class _Builder:
    def __init__(self, top: Path, project: Path, settings: Mapping[str, str]) -> None:
        self._top, self._project, self._settings = top, project, settings
        self._root = top / "root"
        self._host = top / "host"
        self._host.mkdir()
        (self._host / "python").symlink_to(base_python())
        self._seconds: dict[str, float] = {}

    def build(self, dockerfile: Dockerfile) -> Built:
        environment: dict[str, str] = {}
        for stage in dockerfile.stages:
            # All stages have the same root, since a venv knows its own path.
            self._root.mkdir()
            environment = self._run_stage(stage)
            self._root.rename(self._top / stage.name)
        (self._top / dockerfile.final.name).rename(self._root)
        for stage in dockerfile.stages[:-1]:
            shutil.rmtree(self._top / stage.name)
        entrypoint = dockerfile.final.last("ENTRYPOINT").exec_form()
        if entrypoint is None:
            raise ValueError("ENTRYPOINT needs a shell")
        return Built(root=self._root, environment=environment, entrypoint=entrypoint, seconds=self._seconds)

    def _run_stage(self, stage: Stage) -> dict[str, str]:
        variables = {"PATH": f"{self._host}:/usr/bin:/bin"}
        folder = self._root
        for one in stage.instructions:
            if one.word == "ARG":
                variables |= argument(one, variables)
            elif one.word == "ENV":
                variables |= {name: self._inside(substitute(value, variables)) for name, value in assignments(one)}
            elif one.word == "WORKDIR":
                folder = Path(self._inside(one.text))
                folder.mkdir(parents=True)
            elif one.word == "COPY":
                self._copy(one, folder)
            elif one.word == "RUN":
                self._run(one, folder, variables)
        return variables

    def _copy(self, one: Instruction, folder: Path) -> None:
        *sources, target = one.operands()
        to = folder / self._inside(target)
        if stage := one.flags().get("from"):
            (source,) = sources
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(self._top / stage / source.lstrip("/"), to)
            return
        for source in sources:
            files = list(context(self._project, source))
            if not files:
                raise ValueError(f"line {one.line}: {source} is not in the context")
            for path in files:
                # A folder's content is copied, not the folder.
                within = path.relative_to(source) if (self._project / source).is_dir() else Path(path.name)
                place = to / within if target.endswith("/") or (self._project / source).is_dir() else to
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self._project / path, place)

    def _run(self, one: Instruction, folder: Path, variables: Mapping[str, str]) -> None:
        passed_on = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
        environment = {**passed_on, "HOME": str(self._host), **variables, **self._settings}
        command = ["/bin/sh", "-c", self._inside(one.text)]
        began = time.monotonic()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        self._seconds[one.text[:80]] = time.monotonic() - began
        if done.returncode:
            raise RuntimeError(f"line {one.line}: RUN {one.text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")

    def _inside(self, text: str) -> str:
        def moved(match: re.Match[str]) -> str:
            if match["top"] not in INSIDE:
                # Such as HOME=/tmp, which is the machine's own; only a build may not write there.
                if match["top"] in ("tmp", "usr", "bin"):
                    return match[0]
                raise ValueError(f"{match[0]} is outside {INSIDE}")
            return f"{self._root}{match[0]}"

        # What is moved already stays where it is.
        return _ABSOLUTE.sub(moved, text.replace(str(self._root), "\0")).replace("\0", str(self._root))
