"""The GKE guide, run with stand-ins for the programs it calls: order, final values, and a clean-up that is guarded."""

import re
from pathlib import Path

import pytest

from tests.unit.deploy.cloud import Cloud
from tests.unit.deploy.guide import BLOCKS, PRESETS, blocks
from tests.unit.deploy.rehearsal import ANSWERS, Call, rehearse

PART_1 = blocks("Part 1", "Part 2")
PART_2 = blocks("Part 2", "Cost")
COST = blocks("Cost", "Clean up")
NAMES = next(one for one in PART_1 if "export PROJECT=" in one)
*TIDY, EVERYTHING = blocks("Clean up", "When something is wrong")
PROJECT = "my-project"
REGISTRY = f"us-central1-docker.pkg.dev/{PROJECT}/ostrya"


def with_preset(text: str, preset: str) -> str:
    """The block of step 9 as a reader with another row of the table types it."""
    row = PRESETS[preset]
    for name, value in (("PRESET", preset), ("MACHINE", row.machine), ("ZONE", row.zone)):
        text = re.sub(rf"(?<=^export {name}=).*", value, text, flags=re.MULTILINE)
    return text


def run(folder: Path, *shell: str, node_pools: str = "", pasted: bool = False) -> list[Call]:
    return rehearse(folder, shell, node_pools=node_pools, pasted=pasted, PROJECT=PROJECT)


def seen(calls: list[Call]) -> Cloud:
    cloud = Cloud()
    for call in calls:
        cloud.see(call)
    return cloud


def find(calls: list[Call], text: str) -> Call:
    (found,) = [one for one in calls if str(one).startswith(text)]
    return found


@pytest.fixture(scope="module")
def part_1(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    return run(tmp_path_factory.mktemp("part-1"), *PART_1, *COST)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    return run(tmp_path_factory.mktemp("both"), *PART_1, *PART_2, *COST)


def test_part_1_needs_nothing_that_it_has_not_made_before(part_1: list[Call]) -> None:
    cloud = seen(part_1)
    assert cloud.what_costs() == {"cluster ostrya us-central1", f"repository {REGISTRY}"}
    assert "release ostrya" in cloud.facts


def test_part_1_ends_in_these_values(part_1: list[Call]) -> None:
    cluster = find(part_1, "gcloud container clusters create ostrya ")
    assert (cluster.flag("--location"), cluster.flag("--node-locations")) == ("us-central1", "us-central1-a")
    assert cluster.flag("--workload-pool") == f"{PROJECT}.svc.id.goog"
    assert find(part_1, "gcloud billing projects link").flag("--billing-account") == ANSWERS["BILLING_ACCOUNT"]
    built = find(part_1, "docker build --platform linux/amd64 --file deploy/docker/worker-cpu.Dockerfile")
    assert f"PIP_EXTRA_INDEX_URL={ANSWERS['TORCH_INDEX']}" in built.words
    assert f"image.registry={REGISTRY}" in find(part_1, "helm install ostrya").words
    asked = [one for one in part_1 if one.program == "ostrya" or one.begins("exec")]
    assert [one.program for one in asked] == ["kubectl", "kubectl", "ostrya"]
    assert "pod/router-0" in asked[0].words


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_part_2_needs_nothing_that_it_has_not_made_before(preset: str, tmp_path: Path) -> None:
    calls = run(tmp_path, *PART_1, *(with_preset(one, preset) for one in PART_2))
    cloud = seen(calls)
    assert f"nodes ostrya-{preset}" in cloud.facts
    made = find(calls, f"gcloud container node-pools create ostrya-{preset} ")
    assert made.flag("--node-locations") == PRESETS[preset].zone
    assert find(calls, "gcloud compute machine-types list").flag("--filter") == f"name={PRESETS[preset].machine}"


def test_part_2_ends_in_these_values(both: list[Call]) -> None:
    bucket = f"gs://{PROJECT}-models"
    copied = find(both, "gcloud storage cp")
    assert copied.words[-2:] == (ANSWERS["MODEL_DIRECTORY"], f"{bucket}/my-model")
    installed = find(both, "helm install tpu")
    assert installed.flag("--values") == "helm/ostrya/values/v5e-1.yaml"
    assert f"pools.default.model.gcsFuse.bucket={PROJECT}-models" in installed.words
    assert "pools.default.model.gcsFuse.path=my-model" in installed.words
    # The dry run of step 13 prints; it does not buy.
    find(both, "gcloud container node-pools create")


STEPS = (
    "gcloud projects create",
    "gcloud billing projects link",
    "gcloud services enable",
    "gcloud container clusters create",
    "gcloud container clusters get-credentials",
    "gcloud artifacts repositories create",
    "gcloud auth configure-docker",
    "docker build --platform linux/amd64 --file deploy/docker/router",
    "docker push us-central1-docker.pkg.dev/my-project/ostrya/ostrya/worker-cpu",
    "kubectl create namespace",
    "kubectl label namespace",
    "helm install ostrya",
    "kubectl port-forward",
    "docker push us-central1-docker.pkg.dev/my-project/ostrya/ostrya/worker-xla",
    "gcloud storage buckets create",
    "gcloud storage cp",
    "gcloud storage buckets add-iam-policy-binding",
    "gcloud container node-pools create",
)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_is_left_out_is_missed(step: str, both: list[Call]) -> None:
    left = [one for one in both if not str(one).startswith(step)]
    assert len(left) < len(both)
    with pytest.raises(AssertionError, match=r"there is no|there are no|before what is"):
        seen(left)


@pytest.mark.parametrize(
    ("given", "instead", "says"),
    [
        ("GcsFuseCsiDriver", "GcsFuseDriver", "no such addon"),
        ("compute.googleapis.com", "computing.googleapis.com", "no such API"),
        ("cloudquotas.googleapis.com", "storage.googleapis.com", "there is no api cloudquotas"),
        ("--node-locations=us-central1-a", "--node-locations=us-central1-f", "has no ct5lp"),
        ("--enable-dataplane-v2", "--enable-ip-alias", "--enable-dataplane-v2"),
        (f"image.registry={REGISTRY}", "image.tag=0.1.0", "there is no pushed ostrya/router"),
    ],
)
def test_a_word_that_is_wrong_is_noticed(given: str, instead: str, says: str, both: list[Call]) -> None:
    def changed(call: Call) -> Call:
        return Call(program=call.program, words=tuple(word.replace(given, instead) for word in call.words))

    with pytest.raises(AssertionError, match=says):
        seen([changed(one) for one in both])


def test_nodes_before_weights_are_noticed(both: list[Call]) -> None:
    def late(call: Call) -> bool:
        return call.begins("storage", "cp")

    with pytest.raises(AssertionError, match="before what is weights"):
        seen(sorted(both, key=late))


def test_the_clean_up_leaves_nothing_that_costs(both: list[Call], tmp_path: Path) -> None:
    setting = [one for one in PART_2 if all(line.startswith("export ") for line in one.splitlines())]
    assert len(setting) == 2
    tidied = run(tmp_path, NAMES, *setting, *TIDY, node_pools="ostrya-v5e-1")
    cloud = seen([*both, *tidied])
    assert cloud.what_costs() == set()
    assert not [one for one in cloud.facts if one.split()[0] in ("release", "policy", "namespace")]


def test_the_clean_up_deletes_every_slice_and_the_policy(tmp_path: Path) -> None:
    sliced = [with_preset(one, "tpu7x-16").replace("\ndeploy/gke/", "\nSLICES=2 deploy/gke/") for one in PART_2]
    bought = run(tmp_path, *PART_1, *sliced)
    setting = [with_preset(one, "tpu7x-16") for one in PART_2 if "export PRESET" in one or "export BUCKET" in one]
    pools = "ostrya-tpu7x-16 ostrya-tpu7x-16-2"
    before = seen(bought)
    assert {f"nodes {pool}" for pool in pools.split()} <= before.facts
    assert "policy ostrya-2x2x4 us-central1" in before.facts
    after = seen([*bought, *run(tmp_path, NAMES, *setting, *TIDY, node_pools=pools)])
    assert after.what_costs() == set()
    assert not [one for one in after.facts if one.startswith("policy ")]


@pytest.mark.parametrize("pasted", [True, False])
def test_the_clean_up_after_part_1_alone_names_only_what_it_made(
    pasted: bool, part_1: list[Call], tmp_path: Path
) -> None:
    tidy = TIDY if pasted else [one for one in TIDY if "BUCKET" not in one and "ostrya-2x2x4" not in one]
    tidied = run(tmp_path, NAMES, *tidy, pasted=pasted)
    assert not [one for one in tidied if one.begins("storage") or one.begins("container", "node-pools", "delete")]
    made = [one for one in tidied if not one.begins("uninstall", "tpu")]
    assert seen([*part_1, *made]).what_costs() == set()


def test_the_clean_up_does_nothing_in_a_shell_without_names(tmp_path: Path) -> None:
    assert rehearse(tmp_path, [*TIDY, EVERYTHING], pasted=True) == []


def test_everything_goes_with_the_project(both: list[Call], tmp_path: Path) -> None:
    assert seen([*both, *run(tmp_path, NAMES, EVERYTHING)]).facts == set()


def test_names_stay_when_their_block_is_run_again(tmp_path: Path) -> None:
    (once,) = rehearse(tmp_path, [NAMES, 'gcloud projects create "$PROJECT"'])
    assert re.fullmatch(r"ostrya-trial-\d+", once.words[2])
    first, second = rehearse(tmp_path, [NAMES, 'docker push "$REGISTRY"', NAMES, 'docker push "$REGISTRY"'])
    assert first == second


def test_what_is_pasted_after_a_question_is_not_taken_for_its_answer() -> None:
    asking = [one for one in BLOCKS if re.search(r"\bread\b", one)]
    assert [len(one.splitlines()) for one in asking] == [1] * len(ANSWERS)
    assert [one.split()[-1] for one in asking] == list(ANSWERS)
