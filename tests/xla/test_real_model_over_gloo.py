"""SmolLM2 on two processes over gloo gives the golden tokens: 20 prompts, 64 tokens each. Here, and not in numerics/,
because it takes a minute; and here it shows that another torch gives the same tokens."""

import json
from pathlib import Path

from ostrya.text.source import resolve_model
from tests.numerics import workload
from tests.numerics.shard_process import Job, together

GOLDEN = Path(workload.__file__).with_name("golden_smollm2.json")


def test_smollm2_on_two_processes_gives_the_golden_tokens() -> None:
    cases = json.loads(GOLDEN.read_text())["cases"]
    path = str(resolve_model("smollm2-135m-instruct").path)
    expected = {str(number): case["output"] for number, case in enumerate(cases)}
    assert {len(tokens) for tokens in expected.values()} == {workload.NUM_NEW}
    job = Job(path=path, prompts=[case["prompt"] for case in cases])
    for found, _ in together(job, size=2, timeout_s=500):
        assert workload.differences(found, expected) == []
