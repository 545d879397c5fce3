"""A part of a router that fails: requests go on, operators are told, and it heals."""

import pytest

from ostrya.api.v1 import admin_pb2
from ostrya.router.registry import Registry
from ostrya.router.tracker import Tracker
from tests.fakes.waiting import until
from tests.integration.bed import Request, bed, metric, saying, text_of


async def test_requests_go_on_while_discovery_and_tracker_fail_and_status_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bed(saying("yes"), saying("yes")) as stand:
        faults = [True]
        poll, turn = Registry.poll, Tracker._turn

        async def broken_poll(self: Registry) -> None:
            if faults:
                raise KeyError("whatever stood there")
            await poll(self)

        async def broken_turn(self: Tracker) -> None:
            if faults:
                raise ValueError("whatever stood there")
            await turn(self)

        monkeypatch.setattr(Registry, "poll", broken_poll)
        monkeypatch.setattr(Tracker, "_turn", broken_turn)
        await until(lambda: len(stand.router.status().failing) == 2)
        for _ in range(5):
            assert text_of(await stand.ask(Request(text="a"))) == "yes"
        status = await stand.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert [(part.name, part.error) for part in status.failing_parts] == [
            ("discovery", "KeyError"),
            ("tracker", "ValueError"),
        ]
        await until(lambda: min(part.num_restarts for part in stand.router.status().failing.values()) >= 2)
        shown = stand.router._metrics._part_up.labels("discovery")
        await until(lambda: not shown._value.get())
        assert await metric(stand, 'part_up{part="waiting"}') == 1
        assert len(stand.router.fleet.snapshot().replicas) == 2, "the links were left at work"
        faults.clear()
        restarts = stand.router._parts.num_restarts["discovery"]
        await until(lambda: stand.router._parts.num_restarts["discovery"] > restarts, timeout_s=20)
        assert text_of(await stand.ask(Request(text="a"))) == "yes"
