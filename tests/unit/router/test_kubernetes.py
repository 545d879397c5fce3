"""The watch thread against responses that no server should send, and lines however they are cut."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ostrya.router.kubernetes import Resource, Update, Watcher, _lines
from tests.fakes.waiting import until

if TYPE_CHECKING:
    from kubernetes.client import ApiClient
    from urllib3 import HTTPResponse


class Thing(msgspec.Struct, frozen=True):
    value: int = 0


class Response:
    """What Watcher uses of urllib3's."""

    status, reason = 200, ""

    def __init__(self, parts: list[bytes], *, repeated: bytes = b"") -> None:
        self.parts, self.repeated = parts, repeated
        self.is_closed = False

    @property
    def data(self) -> bytes:
        return b"".join(self.parts)

    def stream(self, *, decode_content: bool) -> Iterator[bytes]:
        assert not decode_content
        yield from self.parts
        while self.repeated:
            time.sleep(0.01)  # a server's own pace, in the watcher's thread
            yield self.repeated

    def close(self) -> None:
        self.is_closed = True

    def shutdown(self) -> None:
        self.repeated = b""


class Client:
    """What Watcher uses of the official client: how it drops its connections."""

    def __init__(self) -> None:
        self.rest_client = self.pool_manager = self
        self.num_cleared = 0

    def clear(self) -> None:
        self.num_cleared += 1


class Watched:
    """A watcher and all it told."""

    def __init__(self, *, watch_s: int, listed: list[bytes], streamed: bytes, repeated: bytes = b"") -> None:
        self.updates: list[Update[Mapping[str, Thing]]] = []
        self.watches: list[Response] = []
        self._listed, self._streamed, self._repeated = listed, streamed, repeated
        resource: Resource[Thing, Mapping[str, Thing]] = Resource(
            name="things", where="here", open=self._open, item=Thing, view=dict, watch_s=watch_s
        )
        self.watcher = Watcher(resource, cast("ApiClient", Client()), deliver=self.updates.append)

    def views(self) -> list[dict[str, int]]:
        return [
            {name: thing.value for name, thing in update.view.items()}
            for update in self.updates
            if update.view is not None
        ]

    def events(self) -> list[str]:
        return [update.event.value for update in self.updates if update.event is not None]

    def _open(self, **options: object) -> "HTTPResponse":
        if not options.get("watch"):
            body = self._listed.pop(0) if len(self._listed) > 1 else self._listed[0]
            return cast("HTTPResponse", Response([body]))
        self.watches.append(Response([self._streamed], repeated=self._repeated))
        return cast("HTTPResponse", self.watches[-1])


def listed(**things: int) -> bytes:
    items = [{"metadata": {"name": name}, "value": value} for name, value in things.items()]
    return msgspec.json.encode({"metadata": {"resourceVersion": "7"}, "items": items})


def event(kind: str, name: str, value: int = 0) -> bytes:
    return msgspec.json.encode({"type": kind, "object": {"metadata": {"name": name}, "value": value}}) + b"\n"


async def test_a_watch_that_will_not_end_is_ended_and_the_list_heals_what_it_hid() -> None:
    endless = Watched(watch_s=0, listed=[listed(a=1), listed(a=2)], streamed=b"", repeated=event("BOOKMARK", ""))
    endless.watcher.start()
    assert await until(lambda: endless.views() == [{"a": 1}, {"a": 2}]) < 3.0
    await endless.watcher.close()
    await until(lambda: all(response.is_closed for response in endless.watches))
    assert endless.events()[:2] == ["listed", "listed"]


async def test_only_changes_are_told_and_each_is_the_whole() -> None:
    lines = event("ADDED", "b", 5) + event("MODIFIED", "a", 1) + event("STRANGE", "a", 9) + event("DELETED", "a")
    watched = Watched(watch_s=5, listed=[listed(a=1)], streamed=lines, repeated=event("BOOKMARK", ""))
    watched.watcher.start()
    await until(lambda: len(watched.views()) == 3)
    await watched.watcher.close()
    assert watched.views() == [{"a": 1}, {"a": 1, "b": 5}, {"b": 5}]


async def test_a_watch_that_ends_at_once_is_not_opened_again_at_full_speed() -> None:
    hasty = Watched(watch_s=5, listed=[listed()], streamed=b"")
    hasty.watcher.start()
    await until(lambda: len(hasty.watches) >= 3)
    started = time.monotonic()
    await until(lambda: len(hasty.watches) >= 5)
    assert time.monotonic() - started > 0.5, "0.4 s and 0.8 s are between these"
    assert set(hasty.events()) == {"listed", "reconnected"}
    await hasty.watcher.close()


async def test_a_list_without_items_is_an_empty_one() -> None:
    watched = Watched(
        watch_s=5, listed=[b'{"metadata": {"resourceVersion": "7"}, "items": null}'], streamed=b"", repeated=b"\n"
    )
    watched.watcher.start()
    await until(lambda: watched.views() == [{}])
    await watched.watcher.close()


async def test_close_before_start_and_twice_does_nothing() -> None:
    watched = Watched(watch_s=5, listed=[listed()], streamed=b"")
    await watched.watcher.close()
    await asyncio.gather(watched.watcher.close(), watched.watcher.close())


@given(st.lists(st.text(alphabet="ab é{}", min_size=1), max_size=6), st.lists(st.integers(0, 60), max_size=8))
def test_lines_are_whole_however_the_stream_is_cut(texts: list[str], cuts: list[int]) -> None:
    whole = b"".join(text.encode() + b"\n" for text in texts) + b'{"half'
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    parts = [whole[start:end] for start, end in itertools.pairwise(places)]
    assert list(_lines(cast("HTTPResponse", Response(parts)))) == [text.encode() for text in texts]
