"""What is wrong is one line that says what to do; a compile cache that is of no use only makes a start slower."""

from pathlib import Path

from ostrya.engine.backends import xla_cache
from tests.xla import child


def test_more_devices_than_there_are_is_one_line_with_both_numbers() -> None:
    error = child.run("load", 4, num_devices=2, fails=True)["error"]
    assert error == "ostrya.errors.ConfigError: tensor_parallel is 4; there are 2 CPU devices here: set it to 2"


def test_a_part_of_the_devices_is_refused() -> None:
    error = str(child.run("load", 2, num_devices=4, fails=True)["error"])
    assert error.endswith("divides among all 4 CPU devices or takes one: set it to 4 or 1")


def test_a_compile_cache_may_be_unwritable_or_damaged(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    expected = child.run("load", env={xla_cache.ROOT_VARIABLE: str(file / "below")})["tokens"]

    first = child.run("load", env={xla_cache.ROOT_VARIABLE: str(tmp_path)})
    assert (first["tokens"], first["num_hits"]) == (expected, 0)
    assert isinstance(num_misses := first["num_misses"], int)
    assert num_misses > 0
    programs = [path for path in tmp_path.glob("*/*") if path.name != "identity.json"]
    assert programs, "programs are kept below a directory of their identity"
    # The second process finds them; what XLA's CPU device wrote it cannot read, and that is no reason not to start.
    second = child.run("load", env={xla_cache.ROOT_VARIABLE: str(tmp_path)})
    assert second["tokens"] == expected
    assert second["num_hits"] or second["num_unreadable"]
    for path in programs:
        path.write_bytes(path.read_bytes()[:100])
    assert child.run("load", env={xla_cache.ROOT_VARIABLE: str(tmp_path)})["tokens"] == expected
