"""The GKE guide can be followed: its commands parse and name real files, values, options and flags."""

import re
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from typer.core import TyperGroup

from ostrya.cli.main import app
from tests.chart.render import CHART, NAMESPACE, merged, render
from tests.unit.deploy.guide import (
    BLOCKS,
    GCLOUD,
    GUIDE,
    PRESETS,
    commands,
    flag_names,
    known_gcloud,
    made_by_script,
    set_values,
    value_after,
)
from tests.unit.deploy.images import IMAGES, ROOT, VERSION


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_shell_block_is_valid_bash(number: int) -> None:
    done = subprocess.run(["bash", "-n"], input=BLOCKS[number], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_variable_is_set_before_it_is_used() -> None:
    known = {"RANDOM"}
    for line in "\n".join(BLOCKS).replace("\\\n", " ").splitlines():
        used = set(re.findall(r"\$\{?([A-Za-z_]+)", line))
        assigned = set(re.findall(r"(?:^|\s)(?:export )?([A-Za-z_]+)=", line)) | set(
            re.findall(r"read .* (\w+)$", line)
        )
        looped = set(re.findall(r"^for (\w+) in", line))
        assert used - known - looped <= assigned, line
        known |= assigned | looped


def test_gcloud_commands_and_flags_are_known_ones() -> None:
    found = list(commands("gcloud"))
    assert len(found) > 20
    found += [words[1:] for preset in PRESETS for words in made_by_script(preset)]
    for words in found:
        assert flag_names(words) <= GCLOUD[known_gcloud(words)], words


def test_every_file_it_names_exists() -> None:
    named = set(re.findall(r"\b(?:deploy|helm/ostrya)(?:/[\w.$-]+)+", GUIDE))
    assert len(named) > 8
    for path in named:
        for preset in PRESETS if "$PRESET" in path else [""]:
            assert (ROOT / path.replace("$PRESET", preset).rstrip(".")).exists(), path


def test_images_are_built_under_the_names_the_chart_pulls() -> None:
    built = [(value_after(one, "--file"), value_after(one, "--tag")) for one in commands("docker") if one[0] == "build"]
    assert len(built) == len(IMAGES)
    for file, tag in built:
        image = Path(file).name.removesuffix(".Dockerfile")
        assert image in IMAGES
        assert tag == f"$REGISTRY/ostrya/{image}:{VERSION}"
    pushed = {one[1] for one in commands("docker") if one[0] == "push"}
    assert pushed == {tag for _, tag in built}


def test_ostrya_commands_have_options_that_exist() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    # `helm install ostrya …` names a release, not the program.
    called = [words for words in commands("ostrya") if words and words[0] in group.commands]
    assert len(called) >= 3
    for name, *arguments in called:
        group.commands[name].make_context(name, list(arguments))
    for name in re.findall(r"`ostrya (\w+)", GUIDE):
        assert name in group.commands


@pytest.mark.parametrize("words", [one for one in commands("helm") if one[0] in ("install", "upgrade")], ids=" ".join)
def test_helm_commands_render(words: list[str]) -> None:
    _, release, chart = words[:3]
    assert (ROOT / chart).resolve() == CHART
    presets = sorted(PRESETS) if "--values" in words else [""]
    sets = [words[position + 1] for position, word in enumerate(words) if word == "--set"]
    for preset in presets:
        values: dict[str, object] = {}
        if preset:
            values = yaml.safe_load((ROOT / value_after(words, "--values").replace("$PRESET", preset)).read_text())
        for one in sets:
            given = re.sub(r"\$(\w+)", lambda match: match[1].lower(), one.replace("$PRESET", preset))
            values = merged(values, set_values(given))
        rendered = render(values, release=release, namespace=NAMESPACE)
        accounts = {one.name for one in rendered.of("ServiceAccount")}
        assert preset == "" or {"ostrya-worker", "ostrya-router"} <= accounts


def test_the_service_of_the_first_token_is_one_of_the_charts() -> None:
    (service,) = {word.removeprefix("service/") for one in commands("kubectl") for word in one if "service/" in word}
    assert render({}).has("Service", service)


def test_switches_that_the_table_of_faults_recommends_are_values() -> None:
    recommended = re.findall(r"`--set ([\w.]+=\w+)", GUIDE[GUIDE.index("When something is wrong") :])
    assert len(recommended) >= 2
    for one in recommended:
        render(set_values(one))
