"""The suite's own watch: who leaves something behind fails, whoever does not passes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import asyncio, os, socket, subprocess, sys, threading
import pytest

CHILD = [sys.executable, "-c", "import sys; sys.stdin.read()"]
kept, never = [], threading.Event()


def start():
    kept.append(subprocess.Popen(CHILD, stdin=subprocess.PIPE))
    return kept[-1]


def end(process):
    process.stdin.close()
    process.wait()


def test_leaves_a_thread():
    kept.append(threading.Thread(target=never.wait, name="idler", daemon=True))
    kept[-1].start()


def test_leaves_a_process():
    start()


def test_leaves_a_process_that_it_did_not_wait_for():
    kept.append(subprocess.Popen([sys.executable, "-c", ""]))


def test_leaves_an_orphan():
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:]); "
    subprocess.run([sys.executable, "-c", code, sys.executable, "-c", "import time; time.sleep(20)"], check=True)


def test_leaves_a_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))


async def test_leaves_a_task():
    async def forgotten():
        await asyncio.Event().wait()
    kept.append(asyncio.create_task(forgotten()))


def test_leaves_a_task_in_a_loop_of_its_own():
    async def forgotten():
        await asyncio.Event().wait()
    loop = asyncio.new_event_loop()
    kept.append(loop.create_task(forgotten()))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@pytest.fixture(scope="module")
def careless():
    return start()


def test_leaves_nothing_though_its_fixture_will(careless):
    pass


@pytest.fixture(scope="module")
def tidy():
    process = start()
    yield process
    end(process)


def test_leaves_nothing_with_a_fixture_that_ends_later(tidy):
    pass


@pytest.fixture
async def task():
    task = asyncio.create_task(asyncio.Event().wait())
    yield task
    task.cancel()


async def test_leaves_nothing_that_does_not_end_by_itself(task):
    with socket.create_server(("127.0.0.1", 0)), socket.socket():
        await asyncio.to_thread(lambda: end(start()))
    timer = threading.Timer(0.05, never.is_set)
    timer.start()


def test_leaves_nothing():
    pass
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a run of TESTS says of each test: the line of its error, or nothing."""
    folder = tmp_path_factory.mktemp("leaking")
    (folder / "test_leaking.py").write_text(TESTS)
    (folder / "conftest.py").write_text("from tests import leaks\nleaks.GRACE_S = 0.5\n")
    words = ("-p", "tests.leaks", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--rootdir", str(folder), "-q")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(folder / "test_leaking.py")],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.findall(r"ERROR at teardown of (\w+) _+\n(.*)", done.stdout)
    assert "11 passed" in done.stdout, done.stdout
    return dict(found)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a_thread", "left behind: thread idler"),
        ("a_process", r"left behind: process \d+ \S*python\S* -c import sys; sys.stdin.read\(\)"),
        ("a_process_that_it_did_not_wait_for", r"left behind: process \d+ that ended and was not waited for"),
        ("an_orphan", r"left behind: process \d+ \S*python\S* -c import time; time.sleep\(20\)"),
        ("a_socket", r"left behind: socket of port \d+ to nobody: it listens"),
        ("a_task", r"left behind: task test_leaves_a_task\.<locals>\.forgotten"),
        ("a_task_in_a_loop_of_its_own", r"left behind: task test_leaves_a_task_in_a_loop\w+\.<locals>\.forgotten"),
    ],
)
def test_who_leaves_something_behind_fails_and_is_told_what(outcomes: dict[str, str], name: str, what: str) -> None:
    assert re.match(what, outcomes[f"test_leaves_{name}"])


def test_nobody_else_fails_but_the_last_user_of_a_fixture_that_does(outcomes: dict[str, str]) -> None:
    (blamed,) = [name for name in outcomes if name.startswith("test_leaves_nothing")]
    assert blamed == "test_leaves_nothing"
    assert outcomes[blamed].startswith("fixture careless left behind: process")
