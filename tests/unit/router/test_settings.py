"""What a router refuses to start with, all at once."""

import pytest

from ostrya.errors import ConfigError
from ostrya.router.settings import RouterSettings


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (RouterSettings(discovery="static"), "static_workers is empty"),
        (RouterSettings(discovery="kubernetes"), "kubernetes_service is empty"),
        (
            RouterSettings(discovery="kubernetes", kubernetes_service="w", static_workers=("a:1",)),
            "not used with discovery kubernetes",
        ),
        (
            RouterSettings(discovery="kubernetes", kubernetes_service="w", kubernetes_api="host:6443"),
            "must be like https://host:6443",
        ),
        (RouterSettings(kubernetes_ca_file="/ca.crt"), "kubernetes_ca_file needs a kubernetes_api like https"),
        (
            RouterSettings(kubernetes_token_file="/token", kubernetes_api="http://127.0.0.1:8001"),
            "kubernetes_token_file needs a kubernetes_api like https",
        ),
        (RouterSettings(maintenance=True), "maintenance needs discovery kubernetes"),
        (RouterSettings(maintenance_horizon_s=-1), "maintenance_horizon_s is -1"),
        (RouterSettings(max_connection_age_s=float("nan")), "max_connection_age_s is nan"),
        (RouterSettings(long_request_tokens=0), "long_request_tokens is 0"),
        (RouterSettings(max_waiting=-1), "max_waiting is -1"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_to_do(settings: RouterSettings, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        settings.check()
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    "settings",
    [
        RouterSettings(),
        RouterSettings(discovery="static", static_workers=("worker:50052", "[::1]:50052")),
        RouterSettings(discovery="kubernetes", kubernetes_service="ostrya-default-workers", maintenance=True),
        RouterSettings(discovery="kubernetes", kubernetes_service="w", kubernetes_api="https://[fd00::1]:6443"),
        RouterSettings(
            discovery="kubernetes",
            kubernetes_service="w",
            kubernetes_api="https://api.example:6443",
            kubernetes_ca_file="/ca.crt",
            kubernetes_token_file="/token",
        ),
    ],
)
def test_settings_that_can_work_are_taken(settings: RouterSettings) -> None:
    settings.check()


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        RouterSettings(discovery="kubernetes", static_workers=("a",), kubernetes_api="x", max_waiting=-1).check()
    assert len(refused.value.problems) == 5
