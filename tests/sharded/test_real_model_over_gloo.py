"""SmolLM2 on two processes over gloo gives the golden tokens: 20 prompts, 64 tokens each."""

import json
from pathlib import Path

from ostrya.text.source import resolve_model
from tests.sharded import workload
from tests.sharded.shard_process import Job, together

GOLDEN = Path(__file__).parents[1] / "numerics" / "golden_smollm2.json"


def test_smollm2_on_two_processes_gives_the_golden_tokens() -> None:
    cases = json.loads(GOLDEN.read_text())["cases"]
    path = str(resolve_model("smollm2-135m-instruct").path)
    expected = {str(number): case["output"] for number, case in enumerate(cases)}
    assert {len(tokens) for tokens in expected.values()} == {workload.NUM_NEW}
    job = Job(path=path, prompts=[case["prompt"] for case in cases])
    for found, _ in together(job, size=2, timeout_s=500):
        assert workload.differences(found, expected) == []
