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
    return {path.name for path in directory.parent.iterdir()} - {directory.name}


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
    target.parent.chmod(0o555)
    try:
        assert run(source, target).was_there
    finally:
        target.parent.chmod(0o755)
    assert beside(target) == set()


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
        assert waits.wait(30)
        destination = Destination(target)
        with destination.filling() as directory:
            made(directory, {"a": b"1"})
            destination.publish(source=str(source), part="everything", revision="1")
    second.join(5)
    assert [one.was_there for one in results] == [True]
    assert found(target) == {"a": b"1"}


def test_a_part_of_a_split_model_brings_the_others(tmp_path: Path, target: Path) -> None:
    names = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    source = made(tmp_path / "s", dict.fromkeys((*names, "m.gguf"), b"x"))
    run(source / names[1], target, "model")
    assert set(found(target)) == set(names)
    (source / names[0]).unlink()
    with pytest.raises(FetchFailed, match=f"{names[1]}: there is no {names[0]}, a part of the split model"):
        run(source / names[1], tmp_path / "other", "model")


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


def two_members(path: Path, mode: str) -> Path:
    """A header and a block each, then zeros."""
    return archive(path, (tarfile.TarInfo("1"), b"one"), (tarfile.TarInfo("2"), os.urandom(512)), mode=mode)


@pytest.mark.parametrize(
    ("damage", "mode", "words"),
    [
        (lambda whole: whole[:1024], "w", "it ends at byte 1024 without an end mark"),
        (lambda whole: whole[:2560], "w", "it ends at byte 2048 without an end mark"),
        (lambda whole: whole[:1300], "w", "it is damaged after byte 1024"),
        (lambda whole: whole[:1024] + b"x" + whole[1025:], "w", "it is damaged after byte 1024"),
        (lambda whole: whole + whole, "w", "it is damaged after byte 2048"),
        (lambda whole: whole[:500], "w:gz", "Compressed file ended"),
        (lambda whole: whole[:-8], "w:gz", "Compressed file ended"),
        (lambda whole: whole[:-8] + bytes(4) + whole[-4:], "w:gz", "CRC check failed"),
        (lambda whole: whole, "w:xz", "invalid header"),
    ],
    ids=["at a member", "one zero block", "in a header", "a header", "two", "gzip", "no trailer", "checksum", "xz"],
)
def test_an_archive_that_is_not_whole_is_refused(
    tmp_path: Path, target: Path, damage: Callable[[bytes], bytes], mode: str, words: str
) -> None:
    path = two_members(tmp_path / ("c.tgz" if mode == "w:gz" else "c.tar"), mode)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FetchFailed, match=rf"{path.name} is no archive .* {words}"):
        run(path, target)
    assert not target.exists()
    assert beside(target) == set()


def test_an_archive_may_end_with_its_two_zero_blocks_and_be_compressed_or_not(tmp_path: Path, target: Path) -> None:
    path = two_members(tmp_path / "c.tgz", "w")
    path.write_bytes(path.read_bytes()[: 2048 + 1024])
    assert run(path, target).marker.num_bytes == 3 + 512


def test_of_an_archive_a_model_takes_what_it_takes_of_a_folder(tmp_path: Path, target: Path) -> None:
    names = ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "code/modeling.py")
    path = archive(tmp_path / "m.tar", *((tarfile.TarInfo(name), b"1") for name in names))
    run(path, target, "model")
    assert set(found(target)) == {"config.json", "tokenizer.json", "model.safetensors"}
    run(path, target, "tokenizer")
    assert set(found(target)) == {"config.json", "tokenizer.json"}


def test_an_archive_without_a_model_at_its_top_is_no_model(tmp_path: Path, target: Path) -> None:
    path = archive(tmp_path / "m.tar", (tarfile.TarInfo("m/model.safetensors"), b"1"))
    with pytest.raises(FetchFailed, match=r"m\.tar was unpacked, but there is no \.safetensors .* at its top"):
        run(path, target, "model")
    assert not target.exists()


def test_an_archive_may_hold_its_own_name_and_any_other(tmp_path: Path, target: Path) -> None:
    files = {"c.tar": os.urandom(300_000), ".scratch/x": b"1", ".model.scratch/y": b"2"}
    members = [(tarfile.TarInfo(name), content) for name, content in files.items()]
    run(archive(tmp_path / "c.tar", *members), target)
    assert found(target) == files


def test_a_folder_of_any_name_arrives(source: Path, target: Path) -> None:
    made(source, {".scratch/x": b"1"})
    run(source, target)
    assert found(target)[".scratch/x"] == b"1"


def test_the_root_is_no_destination(source: Path) -> None:
    with pytest.raises(FetchFailed, match="/ cannot be replaced; name a directory in it, like /model"):
        run(source, Path("/"))


def test_a_lock_whose_file_went_away_while_it_was_waited_for_is_none(target: Path) -> None:
    """The second waits for the first's file, which is removed; alone it is with the file that the third would open."""
    first, entered, waits = Destination(target), threading.Event(), threading.Event()
    leave, order = threading.Event(), list[str]()

    def second() -> None:
        with Destination(target).locked(waits.set):
            entered.set()
            assert leave.wait(30)
            order.append("second")

    def third() -> None:
        with Destination(target).locked(leave.set):
            order.append("third")

    threads = [threading.Thread(target=second), threading.Thread(target=third)]
    with first.locked(lambda: None):
        threads[0].start()
        assert waits.wait(30)
    assert entered.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert order == ["second", "third"]
    assert beside(target) == set()
