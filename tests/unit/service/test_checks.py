"""Settings that cannot work are told all at once, without a password."""

import pytest

from ostrya.errors import ConfigError
from ostrya.router.settings import RouterSettings
from ostrya.worker.settings import WorkerSettings


def test_every_problem_of_a_router_is_told_at_once() -> None:
    wrong = RouterSettings(
        redis_url="blah", log_level="loud", max_attempts=0, drain_timeout_s=-1, static_workers=("x",)
    )
    with pytest.raises(ConfigError) as refused:
        wrong.check()
    told = " ".join(refused.value.problems)
    assert len(refused.value.problems) == 5
    assert all(word in told for word in ("redis_url", "loud", "max_attempts", "drain_timeout_s", "host:port"))


def test_a_refused_redis_url_does_not_show_its_password() -> None:
    with pytest.raises(ConfigError) as refused:
        WorkerSettings(worker_id="w", redis_url="http://:hunter2@h/0").check()
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", ["redis://h:1/0", "rediss://user:word@h", "unix:///run/redis.sock"])
def test_redis_urls_that_work_are_taken(url: str) -> None:
    WorkerSettings(worker_id="w", redis_url=url).check()
