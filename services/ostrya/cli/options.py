"""Settings classes as command-line options: name, type, default and help of every field come from the class itself.

A field `max_in_flight` becomes `--max-in-flight` and OSTRYA_MAX_IN_FLIGHT. Its help: the string below it.
"""

import ast
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import typer

S = TypeVar("S")


_NONE: Mapping[str, Mapping[str, int]] = MappingProxyType({})


def takes(
    *sources: type,
    without: Collection[str] = (),
    environment: bool = True,
    words: Mapping[str, Mapping[str, int]] = _NONE,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command that takes **values one option for every field of `sources`, first come first named. `words`:
    of a field that is a number, words that stand for numbers; its help says what it is when absent."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [one for one in inspect.signature(command).parameters.values() if one.kind is not one.VAR_KEYWORD]
        found = {one.name: one for one in own}
        for source in sources:
            for parameter in _parameters(source, environment, words):
                if parameter.name not in without:
                    found.setdefault(parameter.name, parameter)
        command.__signature__ = inspect.Signature(list(found.values()))  # type: ignore[attr-defined]
        return command

    return decorate


def build(settings: type[S], values: dict[str, object]) -> S:
    """An instance from a command's values; those that are not its fields are left alone."""
    fields = get_type_hints(settings)
    chosen = {name: value for name, value in values.items() if name in fields}
    return settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()})


def _parameters(settings: type, environment: bool, words: Mapping[str, Mapping[str, int]]) -> list[inspect.Parameter]:
    helps, defaults = _field_docs(settings), _defaults(settings)
    parameters = []
    for name, kind in get_type_hints(settings).items():
        # typer knows repeatable options as lists.
        kind = list[get_args(kind)[0]] if get_origin(kind) is tuple else kind  # type: ignore[misc]
        default = defaults.get(name, ...)
        variable = f"OSTRYA_{name.upper()}" if environment else None
        flag = name.replace("_", "-")
        flags = f"--{flag}/--no-{flag}" if default is True else f"--{flag}"
        if name in words:
            parser = partial(_number, words=words[name])
            option = typer.Option(flags, envvar=variable, help=helps.get(name), parser=parser, show_default=False)
            option.metavar = f"INTEGER|{'|'.join(words[name])}"
        else:
            option = typer.Option(flags, envvar=variable, help=helps.get(name))
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is ... else list(default) if default == () else default,
                annotation=Annotated[kind, option],
            )
        )
    return parameters


def _number(text: str, words: Mapping[str, int]) -> int:
    """Also of a default, which is a number already."""
    try:
        return words[text] if text in words else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor {' or '.join(words)}") from None


def _defaults(settings: type) -> dict[str, object]:
    if issubclass(settings, msgspec.Struct):
        fields = msgspec.structs.fields(settings)
        return {one.name: one.default for one in fields if one.default is not msgspec.NODEFAULT}
    signature = inspect.signature(settings)
    return {one.name: one.default for one in signature.parameters.values() if one.default is not one.empty}


def _field_docs(settings: type) -> dict[str, str]:
    """The string literal that follows each field in the class body."""
    body = ast.parse(inspect.getsource(settings)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            docs[field.target.id] = str(ast.literal_eval(after.value))
    return docs
