"""What commands print where no terminal ends the lines."""

import pytest

from ostrya.cli import doctor
from ostrya.cli.diagnosis.findings import fail, ok


def test_a_finding_in_a_pipe_is_one_line_and_its_advice_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    worker = "a-release-with-a-long-name-and-a-pool-with-one-too-worker-11"
    sentence = f"replica {worker} hangs: 10.0.0.1:50052 accepts connections and [answers] nothing"
    doctor.show(
        [fail("replicas", sentence, f"Look at {worker}, and at the end of its log."), ok("queue", "none waits")]
    )
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [
        f"fail replicas {sentence}",
        f"→ Look at {worker}, and at the end of its log.",
        "ok   queue    none waits",
        "",
        "1 fail, 1 ok",
    ]
