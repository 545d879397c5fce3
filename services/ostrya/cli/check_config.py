"""`--check-config` of the services: whether a command would accept its options and environment. Starts nothing.

It is stricter than the command itself: an OSTRYA_ variable that no option reads is a typo, or one of the links that
Kubernetes makes for a Service called `ostrya`, and would go unnoticed.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, NoReturn, TypeAlias

import typer

from ostrya.cli.report import USAGE, fail
from ostrya.errors import ConfigError

_PREFIX = "OSTRYA_"
_LINK = re.compile(r"(tcp|udp|sctp)://")
_LINK_HINT = "it looks like a Kubernetes service link; set enableServiceLinks: false in the pod"


def _check_environment(context: typer.Context, value: bool) -> bool:
    """Eager, so that a service link is called one before its value is taken for a port."""
    if value:
        names = {name for option in context.command.params for name in _variables(option)}
        _end(_environment_problems(os.environ, known=names))
    return value


CheckConfig: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--check-config",
        is_eager=True,
        callback=_check_environment,
        help="Only say whether options and environment are valid: 0 if so, else 2.",
    ),
]


def report(*checks: Callable[[], object]) -> NoReturn:
    """Ends the command: the problems that the checks raise as ConfigError, a line each, or that there are none."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    _end(problems)
    print("configuration is valid")
    raise typer.Exit


def _environment_problems(environment: Mapping[str, str], *, known: Iterable[str]) -> list[str]:
    """One for each variable that no option reads, or that is a link."""
    problems = []
    for name, value in sorted(environment.items()):
        if not name.startswith(_PREFIX):
            continue
        is_link = _LINK.match(value) is not None
        if name not in known:
            hint = _LINK_HINT if is_link or "_PORT_" in name or "_SERVICE_" in name else "no option reads it"
            problems.append(f"unknown environment variable {name}; {hint}")
        elif is_link:
            problems.append(f"{name} is {value!r}; {_LINK_HINT}")
    return problems


def _variables(option: object) -> list[str]:
    """What click keeps as nothing, a name or several."""
    names = getattr(option, "envvar", None) or ()
    return [names] if isinstance(names, str) else list(names)


def _end(problems: list[str]) -> None:
    """Ends the command unless there are none; each is a line of its own."""
    if problems:
        fail("\nerror: ".join(problems), USAGE)
