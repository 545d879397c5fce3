"""What a container would run: its arguments and environment as the kubelet would hand them over.

Variables come in order, fields of the pod and keys of Secrets get sample values, and $(NAME) is expanded in values
and arguments as Kubernetes does it: $$ is a dollar, a name that is not set stays as written.
"""

import base64
import contextlib
import functools
import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import pytest
from typer.core import TyperGroup
from typer.main import get_command

from ostrya.cli.main import app
from tests.chart.pods import Pod
from tests.chart.podspec import Container, EnvVar, KeyRef
from tests.chart.render import Render

SAMPLE_SECRET = "s3cr3t-sample"
_REFERENCE = re.compile(r"\$(\$|\(([-._a-zA-Z][-._a-zA-Z0-9]*)\))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One start of `ostrya`."""

    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]


def command_of(render: Render, pod: Pod, container: Container) -> Command:
    """AssertionError on a variable whose source the render does not have."""
    env: dict[str, str] = {}
    for source in container.env_from:
        for ref, kind in ((source.config_map_ref, "ConfigMap"), (source.secret_ref, "Secret")):
            if ref is not None:
                env |= {source.prefix + key: value for key, value in _data(render, kind, ref.name).items()}
    for variable in container.env:
        env[variable.name] = _value(render, pod, variable, env)
    args = tuple(expanded(one, env) for one in (*container.command[1:], *container.args))
    return Command(args=args, env=tuple(sorted(env.items())))


def expanded(text: str, env: Mapping[str, str]) -> str:
    return _REFERENCE.sub(lambda found: "$" if found[1] == "$" else env.get(found[2], found[0]), text)


def _value(render: Render, pod: Pod, variable: EnvVar, env: Mapping[str, str]) -> str:
    source = variable.value_from
    if source is None:
        return expanded(variable.value, env)
    if source.field_ref is not None:
        return _field(pod, source.field_ref.field_path)
    if source.secret_key_ref is not None:
        return _keyed(render, "Secret", source.secret_key_ref)
    if source.config_map_key_ref is not None:
        return _keyed(render, "ConfigMap", source.config_map_key_ref)
    # Resources: a container's CPUs or bytes.
    return "4"


def _field(pod: Pod, path: str) -> str:
    samples = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "metadata.uid": "7f4c2c0e-6a6e-4a53-9f3e-2f6f6f8f4f10",
        "spec.nodeName": "gke-pool-1-node-1",
        "spec.serviceAccountName": pod.spec.service_account_name or "default",
        "status.podIP": "10.4.1.9",
        "status.hostIP": "10.128.0.7",
    }
    labelled = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if labelled is None:
        return samples[path]
    return (pod.labels if labelled[1] == "labels" else pod.annotations)[labelled[2]]


def _keyed(render: Render, kind: str, ref: KeyRef) -> str:
    if not render.has(kind, ref.name):
        # Whether the values name it as existing is test_references.py's question.
        return SAMPLE_SECRET
    return _data(render, kind, ref.name)[ref.key]


def _data(render: Render, kind: str, name: str) -> dict[str, str]:
    manifest = render.named(kind, name)
    plain = msgspec.convert(manifest.tree.get("data" if kind == "ConfigMap" else "stringData", {}), dict[str, str])
    if kind == "ConfigMap":
        return plain
    encoded = msgspec.convert(manifest.tree.get("data", {}), dict[str, str])
    return {key: base64.b64decode(value).decode() for key, value in encoded.items()} | plain


@functools.cache
def check_config(command: Command) -> tuple[int, str]:
    """Exit code and output of the real command line with --check-config, run in this process."""
    said = io.StringIO()
    with (
        _environment(command),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as end,
    ):
        _group().main(args=[*command.args, "--check-config"], prog_name="ostrya")
    assert isinstance(end.value.code, int)
    return end.value.code, said.getvalue()


@functools.cache
def options(command: Command) -> Mapping[str, object]:
    """Each option of the subcommand with the value it would get from arguments, environment and defaults."""
    name, *args = command.args
    with _environment(command):
        return _group().commands[name].make_context(name, args).params


@functools.cache
def _group() -> TyperGroup:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return group


@contextlib.contextmanager
def _environment(command: Command) -> Iterator[None]:
    """Only what the container has: this process may have OSTRYA_ variables of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [one for one in os.environ if one.startswith("OSTRYA_")]:
            patch.delenv(name)
        for name, value in command.env:
            patch.setenv(name, value)
        yield
