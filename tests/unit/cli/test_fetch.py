"""`ostrya fetch` with the clients' own libraries against small servers of this machine.

As a process where that is what counts: an environment that has nothing else in it, signals, and libraries that are not
there. Elsewhere in this one, which has imported the libraries once.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants
from typer.testing import CliRunner, Result

from ostrya.cli.main import app
from ostrya.fetch.report import StartReport, read
from ostrya.text.source import resolve_model
from tests.fakes.gcs import GENERATION, FakeGcs
from tests.fakes.hub import TOKEN, FakeHub
from tests.fakes.waiting import Stopwatch

MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b'{"t": 1}',
    "model-1.safetensors": os.urandom(300_000),
    "model-2.safetensors": os.urandom(200_000),
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"import os",
}
WANTED = {name: MODEL[name] for name in MODEL if name.endswith(("json", "safetensors"))}
SPLIT = [f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
GGUF = dict.fromkeys(SPLIT, b"b") | {"tiny-Q4.gguf": b"4" * 100, "tiny-Q8.gguf": b"8" * 200, "README.md": b"#"}
COMMAND = (sys.executable, "-m", "ostrya.cli.main", "fetch")
# Google's library warns when it is imported; a command shows no such warnings.
pytestmark = pytest.mark.filterwarnings("ignore:Please install grpcio-status:ImportWarning")


class Fetching:
    """Runs the command against the two servers."""

    def __init__(self, gcs: FakeGcs, hub: FakeHub, directory: Path) -> None:
        self.gcs, self.hub, self.directory = gcs, hub, directory
        self.target = directory / "volume" / "model"
        self.environment = {
            "PATH": os.environ["PATH"],
            "STORAGE_EMULATOR_HOST": gcs.url,
            "HF_ENDPOINT": hub.url,
            "HOME": "/nowhere",
        }

    def run(self, source: str, *words: str, **environment: str) -> Result:
        """In this process."""
        return CliRunner().invoke(app, ["fetch", source, str(self.target), *words], env=environment)

    def alone(self, source: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """In a process whose environment has nothing but the two servers in it."""
        return subprocess.run(
            [*COMMAND, source, str(self.target), *words],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def files(self) -> dict[str, bytes]:
        files = [path for path in self.target.rglob("*") if path.is_file() and not path.name.startswith(".ostrya")]
        return {path.relative_to(self.target).as_posix(): path.read_bytes() for path in files}

    def left_over(self) -> set[str]:
        parent = self.target.parent
        return {path.name for path in parent.iterdir()} - {"model"} if parent.exists() else set()

    def refused(self, source: str, *words: str, code: int = 1, **environment: str) -> str:
        """The one line it says."""
        ended = self.run(source, *words, **environment)
        assert (ended.exit_code, ended.stdout, ended.stderr.count("\n")) == (code, "", 1), ended.stderr
        assert ended.stderr.startswith("error: ")
        assert self.left_over() == set()
        return ended.stderr


@pytest.fixture
def fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fetching]:
    cache = {f"cache/{name}": content for name, content in {"a/1": b"x", "2": b"y"}.items()}
    bucket = {f"models/tiny/{name}": content for name, content in MODEL.items()} | cache
    bucket |= {f"s/{name}": b"b" for name in (*SPLIT, "big.gguf", "big-00001-of-00003.gguf")}
    bucket |= {"models/tiny-2/config.json": b"other", "models/tiny/": b"", "q/tiny-Q8.gguf": b"8"}
    with (
        FakeGcs({"bucket": bucket, "empty-bucket": {}}) as gcs,
        FakeHub({"org/tiny": MODEL, "org/tiny-gated": MODEL, "org/tiny-GGUF": GGUF}) as hub,
    ):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
        # The library made these of the environment when it was imported.
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # of its thread, which never ends
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield Fetching(gcs, hub, tmp_path)
        close_session()


def test_a_folder_in_a_bucket_arrives_and_the_second_run_asks_nobody(fetching: Fetching) -> None:
    reports = fetching.directory / "reports"
    first = fetching.alone("gs://bucket/models/tiny", "--report-dir", str(reports))
    assert (first.returncode, first.stdout) == (0, "")
    assert f"now has gs://bucket/models/tiny at {GENERATION}: 500010 bytes" in first.stderr
    assert fetching.files() == WANTED
    (report,) = read(reports)
    assert (report.phase, report.result, report.bytes) == ("fetch_model", "miss", 500_010)
    asked = len(fetching.gcs.requests)
    second = fetching.alone("gs://bucket/models/tiny", "--report-dir", str(reports))
    assert "already has" in second.stderr
    (report,) = read(reports)
    assert report.result == "hit"
    assert report.seconds < 0.1
    assert len(fetching.gcs.requests) == asked
    assert fetching.left_over() == set()


def test_only_the_tokenizer_leaves_the_weights_where_they_are(fetching: Fetching) -> None:
    assert fetching.run("gs://bucket/models/tiny", "--only", "tokenizer").exit_code == 0
    assert set(fetching.files()) == {"config.json", "tokenizer.json"}
    assert not any("safetensors?" in path or "safetensors&" in path for path in fetching.gcs.requests)


@pytest.mark.parametrize("words", [(), ("--only", "tokenizer")])
def test_a_gguf_object_is_one_file(fetching: Fetching, words: tuple[str, ...]) -> None:
    assert fetching.run("gs://bucket/q/tiny-Q8.gguf", *words).exit_code == 0
    assert fetching.files() == {"tiny-Q8.gguf": b"8"}


@pytest.mark.parametrize("source", [f"gs://bucket/s/{SPLIT[1]}", f"hf://org/tiny-GGUF/{SPLIT[0]}"])
def test_a_part_of_a_split_gguf_brings_the_others(fetching: Fetching, source: str) -> None:
    assert fetching.run(source).exit_code == 0
    assert set(fetching.files()) == set(SPLIT)
    assert resolve_model(str(fetching.target)).name == "big"


def test_a_compile_cache_folder_is_taken_whole_and_counts_as_a_hit(fetching: Fetching) -> None:
    words = ("--phase", "fetch_compile_cache", "--report-dir", str(fetching.directory))
    assert fetching.run("gs://bucket/cache", *words).exit_code == 0
    assert fetching.files() == {"a/1": b"x", "2": b"y"}
    (report,) = read(fetching.directory)
    assert (report.phase, report.result) == ("fetch_compile_cache", "hit")


def test_an_archive_in_a_bucket_is_unpacked(fetching: Fetching) -> None:
    packed = fetching.directory / "c.tar.gz"
    subprocess.run(["tar", "czf", packed, "-C", str(Path(__file__).parent), Path(__file__).name], check=True)
    fetching.gcs.buckets["bucket"]["c.tar.gz"] = packed.read_bytes()
    assert fetching.run("gs://bucket/c.tar.gz", "--phase", "fetch_compile_cache").exit_code == 0
    assert fetching.files() == {Path(__file__).name: Path(__file__).read_bytes()}


def test_an_optional_cache_that_is_not_there_is_a_miss_and_no_error(fetching: Fetching) -> None:
    words = ("--phase", "fetch_compile_cache", "--report-dir", str(fetching.directory))
    assert "there is nothing at gs://bucket/none.tar; its bucket exists" in fetching.refused(
        "gs://bucket/none.tar", *words
    )
    assert read(fetching.directory) == []
    ended = fetching.run("gs://bucket/none.tar", "--optional", *words)
    assert (ended.exit_code, "going on without it" in ended.stderr) == (0, True)
    (report,) = read(fetching.directory)
    assert report == StartReport(phase="fetch_compile_cache", result="miss", seconds=report.seconds, bytes=0)
    assert not fetching.target.exists()


def test_a_connection_that_breaks_is_taken_up_again(fetching: Fetching) -> None:
    fetching.gcs.cut_after = {"models/tiny/model-1.safetensors": 100_000}
    assert fetching.run("gs://bucket/models/tiny").exit_code == 0
    assert fetching.files() == WANTED


def test_damaged_content_is_refused_and_nothing_is_left(fetching: Fetching) -> None:
    fetching.gcs.damaged = {"models/tiny/model-2.safetensors"}
    line = fetching.refused("gs://bucket/models/tiny")
    assert "gs://bucket/models/tiny arrived damaged (CRC32C does not match); fetch it again" in line
    assert not fetching.target.exists()


def test_a_killed_fetch_leaves_no_destination_and_the_next_one_completes_it(fetching: Fetching) -> None:
    fetching.gcs.hold.clear()
    command = [*COMMAND, "gs://bucket/models/tiny", str(fetching.target)]
    killed = subprocess.Popen(command, env=fetching.environment)
    try:
        assert fetching.gcs.held.wait(30)
    finally:
        killed.kill()
        killed.wait()
    assert not fetching.target.exists()
    assert fetching.left_over() == {".model.partial", ".model.scratch", ".model.lock"}
    fetching.gcs.hold.set()
    assert fetching.run("gs://bucket/models/tiny").exit_code == 0
    assert fetching.files() == WANTED
    assert fetching.left_over() == set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_in_the_middle_of_a_download(fetching: Fetching, number: signal.Signals) -> None:
    fetching.gcs.hold.clear()
    command = [*COMMAND, "gs://bucket/models/tiny", str(fetching.target)]
    running = subprocess.Popen(command, env=fetching.environment)
    assert fetching.gcs.held.wait(30)
    watch = Stopwatch(running.pid)
    running.send_signal(number)
    assert watch.until_ended(running.pid) < 2
    assert running.wait() == 128 + number


def test_every_failure_says_what_to_do_in_one_line(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = fetching.refused
    assert "bucket nobody does not exist" in refused("gs://nobody/models")
    assert "bucket nobody does not exist" in refused("gs://nobody/c.tar", "--optional")
    assert "there is nothing at gs://empty-bucket/" in refused("gs://empty-bucket")
    assert "there is no .safetensors and no .gguf file" in refused("gs://bucket/models/tiny-2")
    assert "hf://org/none does not exist, or HF_TOKEN may not read it" in refused("hf://org/none")
    assert "hf://org/tiny has no revision v9" in refused("hf://org/tiny@v9")
    assert "4 .gguf files; name one of them" in refused("hf://org/tiny-GGUF")
    assert "hf://org/tiny-GGUF has no other.gguf" in refused("hf://org/tiny-GGUF/other.gguf")
    fetching.gcs.is_forbidden = True
    assert "no permission to read gs://bucket/models/tiny; grant" in refused("gs://bucket/models/tiny")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "hf://org/tiny cannot be read: " in refused("hf://org/tiny")


def test_what_does_not_fit_is_refused_before_a_byte_is_fetched(fetching: Fetching) -> None:
    fetching.gcs.sizes = {"models/tiny/model-1.safetensors": 10**17}
    line = fetching.refused("gs://bucket/models/tiny")
    assert f"no space for {fetching.target}: it takes 100000000.00 GB and " in line
    assert not any(path.startswith("/download/") for path in fetching.gcs.requests)


def test_bad_words_are_usage_errors(fetching: Fetching) -> None:
    assert "scheme 's3'" in fetching.refused("s3://bucket/x", code=2)
    cache = ("--only", "tokenizer", "--phase", "fetch_compile_cache")
    assert "--only tokenizer is for models" in fetching.refused("gs://bucket/x", *cache, code=2)
    assert fetching.run("gs://bucket/x", "--phase", "nap").exit_code == 2


def test_a_model_on_the_hub_arrives_and_the_second_run_asks_nobody(fetching: Fetching) -> None:
    first = fetching.alone("hf://org/tiny@v1")
    assert (first.returncode, FakeHub.commit("org/tiny", "v1") in first.stderr) == (0, True)
    assert fetching.files() == WANTED
    assert sorted(fetching.hub.downloads) == sorted(WANTED)
    assert "already has" in fetching.alone("hf://org/tiny@v1", HF_ENDPOINT="http://127.0.0.1:1").stderr
    assert fetching.left_over() == set()


def test_one_gguf_of_many_is_named(fetching: Fetching) -> None:
    assert fetching.run("hf://org/tiny-GGUF/tiny-Q8.gguf").exit_code == 0
    assert fetching.files() == {"tiny-Q8.gguf": GGUF["tiny-Q8.gguf"]}


def test_a_gated_model_takes_a_token_that_is_never_shown(fetching: Fetching) -> None:
    assert "may not read it" in fetching.refused("hf://org/tiny-gated")
    wrong = fetching.refused("hf://org/tiny-gated", HF_TOKEN="hf_wrong")
    assert "hf_wrong" not in wrong
    right = fetching.run("hf://org/tiny-gated", HF_TOKEN=TOKEN)
    assert (right.exit_code, TOKEN in right.stderr) == (0, False)
    assert fetching.files() == WANTED
    assert TOKEN not in json.dumps((fetching.target / ".ostrya-fetch.json").read_text())


def test_a_file_from_the_hub_that_is_cut_short_is_refused(fetching: Fetching) -> None:
    fetching.hub.short = {"model-1.safetensors"}
    assert "hf://org/tiny cannot be read: " in fetching.refused("hf://org/tiny")
    assert not fetching.target.exists()


@pytest.mark.parametrize(
    ("source", "module"), [("gs://bucket/models/tiny", "google.cloud.storage"), ("hf://org/tiny", "huggingface_hub")]
)
def test_a_library_that_is_not_installed_is_named(fetching: Fetching, source: str, module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from ostrya.cli.main import main; main()"
    words = [sys.executable, "-c", code, "fetch", source, str(fetching.target)]
    ended = subprocess.run(words, env=fetching.environment, capture_output=True, text=True, timeout=60, check=False)
    scheme = source.split(":")[0]
    assert (ended.returncode, ended.stderr) == (
        1,
        f"error: {scheme}:// needs a library that is not installed: pip install 'ostrya[fetch]'\n",
    )


def test_a_path_needs_no_library_and_what_was_fetched_is_served_by_its_directory(fetching: Fetching) -> None:
    hidden = "import sys; sys.modules['huggingface_hub'] = sys.modules['google.cloud.storage'] = None; "
    code = hidden + "from ostrya.cli.main import main; main()"
    local = fetching.directory / "local"
    local.mkdir()
    (local / "Tiny.gguf").write_bytes(b"GGUF")
    words = [sys.executable, "-c", code, "fetch", str(local), str(fetching.target)]
    assert subprocess.run(words, env=fetching.environment, timeout=60, check=False).returncode == 0
    assert resolve_model(str(fetching.target)).name == "tiny"
