"""The Dockerfiles keep the rules of deploy/docker: small, pinned, non-root, nothing that only a registry could tell."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest

from tests.ops.dockerfile import context, ignored
from tests.unit.deploy.images import FILES, IMAGES, PYPROJECT, ROOT, VERSION

EVERY = pytest.mark.parametrize("name", sorted(IMAGES))


def test_there_is_one_for_each_image_of_the_chart() -> None:
    assert sorted(IMAGES) == ["router", "worker-cpu", "worker-torchtpu", "worker-xla"]


@EVERY
def test_it_has_a_build_stage_and_a_final_one_from_the_same_exact_base(name: str) -> None:
    build, final = IMAGES[name].stages
    assert build.name == "build"
    assert build.base == final.base
    # A venv finds its Python by path: both stages must have it in the same place.
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", final.base)


@EVERY
def test_it_runs_as_nobody_in_particular(name: str) -> None:
    assert IMAGES[name].final.last("USER").text == "65532:65532"


@EVERY
def test_it_starts_our_console_script_without_a_shell(name: str) -> None:
    assert IMAGES[name].final.last("ENTRYPOINT").exec_form() == ["ostrya"]
    assert "ostrya" in tomllib.loads(PYPROJECT)["project"]["scripts"]
    assert IMAGES[name].final.last("STOPSIGNAL").text == "SIGTERM"


@EVERY
def test_the_final_stage_runs_nothing_and_takes_only_the_venv(name: str) -> None:
    final = IMAGES[name].final
    assert final.all("RUN") == []
    (copy,) = final.all("COPY")
    assert (copy.flags(), copy.operands()) == ({"from": "build"}, ["/opt/ostrya", "/opt/ostrya"])


@EVERY
def test_it_writes_nowhere_but_below_tmp(name: str) -> None:
    environment = IMAGES[name].final.pairs("ENV", {"PATH": "/usr/bin"})
    assert environment["HOME"] == "/tmp"
    assert environment["PATH"] == "/opt/ostrya/bin:/usr/bin"
    assert environment["PYTHONDONTWRITEBYTECODE"] == environment["PYTHONUNBUFFERED"] == "1"


@EVERY
def test_everything_comes_from_a_lock_file_or_from_here(name: str) -> None:
    lines = [one.text for one in IMAGES[name].stages[0].all("RUN")]
    installs = [part for line in lines for part in line.split("&&") if re.search(r"pip\b.*\b(install|wheel)\b", part)]
    assert len(installs) >= 4
    for line in installs:
        assert "--require-hashes" in line or "--no-index --no-deps" in line, line
    assert not [line for line in lines if re.search(r"\b(curl|wget|apt-get|git)\b|https?:", line)]


@EVERY
def test_it_installs_its_own_lock_file_and_checks_what_it_installed(name: str) -> None:
    lines = [one.text for one in IMAGES[name].stages[0].all("RUN")]
    assert any(f"-r locks/{name}.txt" in line for line in lines)
    assert re.search(r"/opt/ostrya/bin/python +-c", lines[-1])
    part = "router" if name == "router" else "worker"
    assert f"/opt/ostrya/bin/ostrya {part} --help" in lines[-1]


@EVERY
def test_what_it_copies_is_in_the_context(name: str) -> None:
    for copy in IMAGES[name].stages[0].all("COPY"):
        for source in copy.operands()[:-1]:
            assert list(context(ROOT, source)), f"{source} is not in the context"


@EVERY
def test_what_a_step_reads_was_copied_before(name: str) -> None:
    build = IMAGES[name].stages[0]
    copied = {
        f"{copy.operands()[-1].removeprefix('./')}{PurePosixPath(source).name}": copy.line
        for copy in build.all("COPY")
        for source in copy.operands()[:-1]
    }
    read = {(word, run.line) for run in build.all("RUN") for word in re.findall(r"(?<= -r )\S+", run.text)}
    assert read
    # What the wheel is made of.
    project = tomllib.loads(PYPROJECT)["project"]
    (wheel,) = [run.line for run in build.all("RUN") if "pip wheel" in run.text]
    read |= {(one, wheel) for one in ("pyproject.toml", project["readme"], "LICENSE")}
    assert {word for word, line in read if copied.get(word, line) >= line} == set()
    assert {one.operands()[-1]: one.operands()[0] for one in build.all("COPY")}["services"] == "services"


@EVERY
def test_labels_and_ports_say_what_it_is(name: str) -> None:
    labels = IMAGES[name].final.pairs("LABEL")
    assert labels["org.opencontainers.image.title"] == f"ostrya/{name}"
    assert labels["org.opencontainers.image.version"] == VERSION
    assert labels["org.opencontainers.image.licenses"] == tomllib.loads(PYPROJECT)["project"]["license"]
    assert labels["org.opencontainers.image.description"]
    grpc_port = "50051" if name == "router" else "50052"
    assert IMAGES[name].final.last("EXPOSE").text.split() == [grpc_port, "9401"]


@EVERY
def test_no_index_and_no_secret_is_written_into_it(name: str) -> None:
    arguments = [one.text for stage in IMAGES[name].stages for one in stage.all("ARG")]
    assert {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"} <= set(arguments), "declared, without a default"
    text = FILES[name].read_text()
    assert not re.search(r"https?://|(?i:password|secret|token *=)", text)


def test_the_context_leaves_out_git_venvs_and_tests() -> None:
    rules = (ROOT / ".dockerignore").read_text()
    private = [".git/config", ".venv/bin/python", "tests/README.md", "deploy/gke/README.md", ".env", "services/x.pyc"]
    assert [path for path in private if not ignored(PurePosixPath(path), rules)] == []


@EVERY
def test_hadolint_finds_nothing(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        skip_or_fail = pytest.fail if os.environ.get("OSTRYA_REQUIRE_ALL") == "1" else pytest.skip
        skip_or_fail("no hadolint in this venv")
    done = subprocess.run([hadolint, FILES[name]], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
