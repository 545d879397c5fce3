"""Reads a Dockerfile: stages, continuation lines, ARG and ENV substitution, the context that .dockerignore leaves.

What our files use and no more; anything else is a ValueError, so that no line is passed over. install.py runs what is
read here, tests/unit/deploy looks at it.
"""

import fnmatch
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

WORDS = frozenset(
    {"ARG", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "LABEL", "RUN", "STOPSIGNAL", "USER", "WORKDIR"}
)
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)\}|(?P<plain>\w+))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction, its continuation lines joined."""

    line: int
    word: str
    text: str

    def exec_form(self) -> list[str] | None:
        """Its words if it is a JSON array; no shell reads those."""
        return list(json.loads(self.text)) if self.text.startswith("[") else None

    def flags(self) -> dict[str, str]:
        """`--from=build` and its like."""
        return dict(one[2:].split("=", 1) for one in self.text.split() if one.startswith("--"))

    def operands(self) -> list[str]:
        """The words that are no flags."""
        return [one for one in shlex.split(self.text) if not one.startswith("--")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From one FROM to the next."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def all(self, word: str) -> list[Instruction]:
        return [one for one in self.instructions if one.word == word]

    def last(self, word: str) -> Instruction:
        """The one that counts, where a later one replaces an earlier one. LookupError if there is none."""
        found = self.all(word)
        if not found:
            raise LookupError(f"stage {self.name} has no {word}")
        return found[-1]

    def pairs(self, word: str, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """NAME=value of every ENV or LABEL, with variables put in as they are known by then."""
        known = dict(variables or {})
        found: dict[str, str] = {}
        for one in self.instructions:
            if one.word == "ARG":
                known |= argument(one, known)
            elif one.word in ("ENV", word):
                new = {name: substitute(value, known) for name, value in assignments(one)}
                known |= new if one.word == "ENV" else {}
                found |= new if one.word == word else {}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Dockerfile:
    """A parsed file."""

    stages: tuple[Stage, ...]
    arguments: Mapping[str, str] = field(default_factory=dict)
    """ARG before the first FROM, with its default."""

    @property
    def final(self) -> Stage:
        return self.stages[-1]


def parse(text: str) -> Dockerfile:
    """ValueError for what is not a Dockerfile of ours."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for one in _instructions(text):
        if one.word == "FROM":
            words = substitute(one.text, arguments).split()
            name = words[2] if len(words) == 3 and words[1].upper() == "AS" else str(len(stages))
            stages.append(Stage(name=name, base=words[0], instructions=()))
        elif not stages:
            if one.word != "ARG":
                raise ValueError(f"line {one.line}: {one.word} before the first FROM")
            arguments |= argument(one, arguments)
        else:
            stage = stages[-1]
            stages[-1] = Stage(name=stage.name, base=stage.base, instructions=(*stage.instructions, one))
    if not stages:
        raise ValueError("no FROM")
    return Dockerfile(stages=tuple(stages), arguments=arguments)


def argument(one: Instruction, known: Mapping[str, str]) -> dict[str, str]:
    """An ARG and its default; nothing if it has none, since then it is unset."""
    name, has_default, default = one.text.partition("=")
    return {name: substitute(default, known)} if has_default else {}


def assignments(one: Instruction) -> list[tuple[str, str]]:
    """NAME=value pairs of ENV or LABEL, quotes removed."""
    pairs = [word.partition("=") for word in shlex.split(one.text)]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ValueError(f"line {one.line}: {wrong[0]!r} is not NAME=value")
    return [(name, value) for name, _, value in pairs]


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """${NAME} and $NAME; a name that is not known is empty, as in Docker."""
    return _VARIABLE.sub(lambda match: variables.get(match["braced"] or match["plain"], ""), text)


def ignored(path: PurePosixPath, rules: str) -> bool:
    """Whether .dockerignore leaves `path` out; the last rule that matches it, or a folder it is in, decides."""
    out = False
    for line in rules.splitlines():
        rule = line.strip()
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!").strip("/")
        if any(_matches(one, pattern) for one in (path, *path.parents) if one != PurePosixPath(".")):
            out = not rule.startswith("!")
    return out


def context(root: Path, source: str) -> Iterator[Path]:
    """Files of a build context that a COPY of `source` takes, relative to `root`."""
    rules = (root / ".dockerignore").read_text()
    start = root / source
    for path in sorted(start.rglob("*")) if start.is_dir() else [start]:
        relative = path.relative_to(root)
        if path.is_file() and not ignored(PurePosixPath(relative), rules):
            yield relative


def _matches(path: PurePosixPath, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch.fnmatchcase(path.name, pattern.removeprefix("**/"))
    parts = pattern.split("/")
    return len(parts) == len(path.parts) and all(map(fnmatch.fnmatchcase, path.parts, parts))


def _instructions(text: str) -> Iterator[Instruction]:
    joined, began = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        began = began or number
        if line.endswith("\\"):
            joined += line[:-1].strip() + " "
            continue
        word, _, rest = (joined + line.strip()).partition(" ")
        if word not in WORDS:
            raise ValueError(f"line {began}: {word} is not an instruction that this parser knows")
        yield Instruction(line=began, word=word, text=rest.strip())
        joined, began = "", 0
    if joined:
        raise ValueError(f"line {began}: ends in a continuation")
