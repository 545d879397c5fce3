"""A destination is complete or not there, whatever happens meanwhile. Sources are files of this machine."""

import io
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ostrya.errors import ConfigError
from ostrya.fetch.destination import MARKER, Destination
from ostrya.fetch.fetching import Fetched, fetch
from ostrya.fetch.remote import FetchFailed, Missing
from ostrya.fetch.selection import Part


def silent(text: str) -> None:
    raise AssertionError(f"nobody should wait: {text}")


def run(source: Path, destination: Path, part: Part = "everything", say: Callable[[str], None] = silent) -> Fetched:
    return fetch(str(source), destination, part, say=say)


def made(directory: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def found(directory: Path) -> dict[str, bytes]:
    """Every file but the marker."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != MARKER]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def beside(directory: Path) -> set[str]:
    """What is left over next to it."""
    return {path.name for path in directory.parent.iterdir()} - {directory.name, f".{directory.name}.lock"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return made(tmp_path / "source", {"a": b"1", "deep/er/b": b"22"})


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "volume" / "model"


def test_a_folder_arrives_whole_and_the_second_time_nothing_is_done(source: Path, target: Path) -> None:
    first = run(source, target)
    assert (first.was_there, first.marker.num_bytes) == (False, 3)
    assert found(target) == {"a": b"1", "deep/er/b": b"22"}
    before = target.stat()
    second = run(source, target)
    assert (second.was_there, second.marker) == (True, first.marker)
    assert target.stat() == before
    assert beside(target) == set()


def test_a_hit_needs_no_right_to_write_and_no_source(source: Path, target: Path) -> None:
    run(source, target)
    source.rename(source.with_name("elsewhere"))
    (target.parent / ".model.lock").unlink()
    target.parent.chmod(0o555)
    try:
        assert run(source, target).was_there
    finally:
        target.parent.chmod(0o755)
    assert not (target.parent / ".model.lock").exists()


@pytest.mark.parametrize("damage", ["missing", "short", "no marker content"])
def test_a_destination_that_lost_something_is_fetched_anew(source: Path, target: Path, damage: str) -> None:
    run(source, target)
    match damage:
        case "missing":
            (target / "a").unlink()
        case "short":
            (target / "deep/er/b").write_bytes(b"2")
        case _:
            (target / MARKER).write_bytes(b"")
    assert not run(source, target).was_there
    assert found(target) == {"a": b"1", "deep/er/b": b"22"}
    assert beside(target) == set()


def test_another_source_or_part_replaces_what_is_there(tmp_path: Path, source: Path, target: Path) -> None:
    run(source, target)
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"w"}
    other = made(tmp_path / "other", files)
    assert not run(other, target, "model").was_there
    assert found(target) == files
    assert not run(other, target, "tokenizer").was_there
    assert found(target) == {"config.json": b"{}", "tokenizer.json": b"{}"}


def test_what_a_crash_left_is_swept_away(source: Path, target: Path) -> None:
    made(target.parent, {".model.partial/half": b"", ".model.old/a": b""})
    run(source, target)
    assert found(target) == {"a": b"1", "deep/er/b": b"22"}
    assert beside(target) == set()


def test_files_that_are_not_ours_are_never_replaced(source: Path, target: Path) -> None:
    made(target, {"thesis.tex": b"years"})
    with pytest.raises(FetchFailed, match="was not made by `ostrya fetch`; remove it"):
        run(source, target)
    assert found(target) == {"thesis.tex": b"years"}


def test_an_empty_directory_may_be_there_before(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    run(source, target)
    assert found(target) == {"a": b"1", "deep/er/b": b"22"}


def test_a_volume_itself_is_no_destination(source: Path) -> None:
    with pytest.raises(FetchFailed, match="/proc is a volume itself; name a directory in it, like /proc/model"):
        run(source, Path("/proc"))


def test_a_failed_fetch_leaves_what_was_there(tmp_path: Path, source: Path, target: Path) -> None:
    run(source, target)
    broken = tmp_path / "broken.tar"
    broken.write_bytes(b"no archive")
    with pytest.raises(FetchFailed, match=r"broken\.tar is no archive"):
        run(broken, target)
    assert found(target) == {"a": b"1", "deep/er/b": b"22"}
    assert beside(target) == set()


def test_two_at_a_time_fetch_once(source: Path, target: Path) -> None:
    waits, results = threading.Event(), list[Fetched]()
    with Destination(target).locked(lambda: None):
        second = threading.Thread(target=lambda: results.append(run(source, target, say=lambda text: waits.set())))
        second.start()
        assert waits.wait(5)
        destination = Destination(target)
        with destination.filling() as directory:
            made(directory, {"a": b"1"})
            destination.publish(source=str(source), part="everything", revision="1")
    second.join(5)
    assert [one.was_there for one in results] == [True]
    assert found(target) == {"a": b"1"}


def test_nothing_there_is_told_apart_from_a_mistake(tmp_path: Path, target: Path) -> None:
    with pytest.raises(Missing, match="does not exist"):
        run(tmp_path / "nowhere.tar", target)
    (tmp_path / "void").mkdir()
    with pytest.raises(Missing, match="is empty"):
        run(tmp_path / "void", target)
    with pytest.raises(ConfigError):
        fetch("ftp://x/y", target, "model", say=silent)
    assert not target.exists()


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def link(kind: bytes, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo("link")
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(("name", "mode"), [("c.tar", "w"), ("c.tar.gz", "w:gz"), ("c.tgz", "w:gz")])
def test_an_archive_is_unpacked(tmp_path: Path, target: Path, name: str, mode: str) -> None:
    path = archive(tmp_path / name, (tarfile.TarInfo("x/1"), b"one"), (tarfile.TarInfo("2"), b"two"), mode=mode)
    assert run(path, target).marker.num_bytes == 6
    assert found(target) == {"x/1": b"one", "2": b"two"}


@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo("../outside"),
        tarfile.TarInfo("a/../../outside"),
        link(tarfile.SYMTYPE, "/etc"),
        link(tarfile.SYMTYPE, "inside"),
        link(tarfile.LNKTYPE, "../outside"),
        link(tarfile.FIFOTYPE, ""),
    ],
    ids=lambda member: f"{member.name} {member.linkname}",
)
def test_an_archive_that_reaches_outside_or_links_is_refused(
    tmp_path: Path, target: Path, member: tarfile.TarInfo
) -> None:
    path = archive(tmp_path / "evil.tar", (tarfile.TarInfo("good"), b"1"), (member, b""))
    with pytest.raises(FetchFailed, match=r"evil\.tar is no archive that can be unpacked here"):
        run(path, target)
    assert not target.exists()
    assert beside(target) == set()
    assert not (target.parent / "outside").exists()


def test_an_absolute_name_stays_inside(tmp_path: Path, target: Path) -> None:
    run(archive(tmp_path / "c.tar", (tarfile.TarInfo(f"{tmp_path}/owned"), b"1")), target)
    assert not (tmp_path / "owned").exists()
    assert list(found(target).values()) == [b"1"]


def test_an_archive_cut_short_is_refused(tmp_path: Path, target: Path) -> None:
    path = archive(tmp_path / "c.tar.gz", (tarfile.TarInfo("x"), os.urandom(10_000)), mode="w:gz")
    path.write_bytes(path.read_bytes()[:5_000])
    with pytest.raises(FetchFailed, match="is no archive"):
        run(path, target)
