from dataclasses import dataclass

import msgspec
import typer
from typer.testing import CliRunner

from ostrya.cli.options import build, takes


@dataclass(frozen=True, kw_only=True)
class Server:
    name: str
    """What it is called."""
    port: int = 0
    peers: tuple[str, ...] = ()
    quick: bool = True
    loud: bool = False


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    secret: str
    limit: int | None = None
    """Absent: none."""


def outcome(*words: str, env: dict[str, str] | None = None) -> str:
    app = typer.Typer()

    @app.command()
    @takes(Server, Machine, without=("secret",))
    def show(**values: object) -> None:
        print(build(Server, values), build(Machine, {**values, "secret": "s"}))

    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200", **(env or {})})
    return result.output


def test_every_field_is_an_option_with_its_own_type_and_default() -> None:
    assert "name='a', port=0, peers=()" in outcome("--name", "a")
    shown = outcome("--name", "a", "--port", "7", "--peers", "x:1", "--peers", "y:2", "--limit", "3")
    assert "port=7, peers=('x:1', 'y:2')" in shown
    assert "limit=3" in shown


def test_what_is_on_can_be_switched_off() -> None:
    assert "quick=True, loud=False" in outcome("--name", "a")
    assert "quick=False, loud=True" in outcome("--name", "a", "--no-quick", "--loud")
    assert "quick=False" in outcome("--name", "a", env={"OSTRYA_QUICK": "0"})


def test_every_field_has_an_environment_variable() -> None:
    env = {"OSTRYA_NAME": "b", "OSTRYA_PORT": "9", "OSTRYA_PEERS": "x:1 y:2"}
    assert "name='b', port=9, peers=('x:1', 'y:2')" in outcome(env=env)


def test_the_help_of_an_option_stands_below_its_field() -> None:
    shown = outcome("--help")
    assert "What it is called." in shown
    assert "Absent: none." in shown
    assert "secret" not in shown


def test_a_field_without_default_is_required() -> None:
    assert "Missing option '--name'" in outcome()
