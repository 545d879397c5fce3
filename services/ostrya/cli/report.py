"""How commands end: one clear line on stderr and an exit code, never a traceback for something a person can fix."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeAlias

import typer

from ostrya.errors import ConfigError, OstryaError, Unavailable
from ostrya.service.checks import is_address

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import RenderableType

FAILED = 1
USAGE = 2
INTERRUPTED = 130

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Machine-readable, on stdout.")]
DEFAULT_TARGET = "127.0.0.1:50051"
PIPED_COLUMNS = 10_000
"""Where no terminal ends the lines."""


def fail(message: str, code: int = FAILED) -> NoReturn:
    """Says why on stderr and ends the command."""
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)


def address(target: str) -> str:
    """`target` if it is host:port; ends the command otherwise: gRPC would take anything, and complain in its log."""
    if not is_address(target):
        fail(f"--target is {target!r}; it must be host:port, like {DEFAULT_TARGET}", USAGE)
    return target


Target: TypeAlias = Annotated[
    str,
    typer.Option("--target", envvar="OSTRYA_TARGET", help="host:port of the router to talk to.", callback=address),
]


@contextmanager
def reported() -> Iterator[None]:
    """Turns Ostrya's errors, the system's and Ctrl-C inside the block into an exit code."""
    try:
        yield
    except ConfigError as error:
        fail(str(error), USAGE)
    except Unavailable as error:
        hint = (
            "; start a stack with `ostrya up`, or name another with --target"
            if "cannot be reached" in str(error)
            else ""
        )
        fail(f"{error}{hint}")
    except BrokenPipeError:
        raise  # typer's: whoever read our output has gone, and that is no error
    except (OstryaError, OSError) as error:
        fail(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def show(*parts: "RenderableType") -> None:
    """Tables and sentences on stdout: folded where a terminal is too narrow, whole lines in a pipe or file."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(*parts, sep="\n", highlight=False)
        return
    wide = Console(width=PIPED_COLUMNS, color_system=None)
    with wide.capture() as captured:
        wide.print(*parts, sep="\n", highlight=False)
    # Cells of a table are padded to its width.
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def fits(rows: "RenderableType") -> bool:
    """Whether `show` folds nothing of it."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        return True
    unbounded = console.options.update(width=PIPED_COLUMNS)
    return console.measure(rows, options=unbounded).maximum <= console.width


def print_json(message: "Message") -> None:
    """A message with every field, names as in the protos."""
    from google.protobuf.json_format import MessageToJson

    print(MessageToJson(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
