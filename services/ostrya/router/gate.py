"""What a request is refused for before any method sees it: its size, by counts that cost the same for every request.

The server asks on the event loop, before decoding and after it. Before, because decoding some hundred thousand messages
takes a tenth of a second and seven times their bytes; after, because only then lists can be counted exactly.
"""

import logging
from collections.abc import Iterator

from ostrya.api.v1 import inference_pb2
from ostrya.errors import InvalidRequest
from ostrya.router import convert
from ostrya.router.metrics import RouterMetrics
from ostrya.router.served import ServedModel
from ostrya.service.bounds import MAX_GRAMMAR_BYTES, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from ostrya.service.status import code_of

log = logging.getLogger(__name__)

_LOOK_BYTES = 64 << 10
"""Smaller requests are decoded in a few milliseconds, whatever they are made of."""

_MAX_SAMPLING_BYTES = 16 * (MAX_STOP_TOKEN_IDS + MAX_LOGIT_BIAS) + 2 * MAX_GRAMMAR_BYTES
"""Six bytes an id at most, if every one has a tag of its own, thirteen a bias, and a grammar, whose own limit is told
later, and exactly."""

_MAX_OTHER_FIELDS = 1_024
"""A request has a dozen and up to 150 strings, and lists of ids are one field each; a client that does not pack them
sends short ones."""

_KINDS = {
    f"/{method.containing_service.full_name}/{method.name}": method.input_type
    for method in inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods
}


class Gate:
    """Of one router."""

    def __init__(self, *, served: ServedModel, bounds: convert.Bounds, metrics: RouterMetrics) -> None:
        self._served, self._bounds, self._metrics = served, bounds, metrics

    def check_raw(self, method: str, raw: bytes) -> None:
        """InvalidRequest for bytes that are not worth decoding."""
        if len(raw) > _LOOK_BYTES and method in _KINDS:
            names = {number: field.name for number, field in _KINDS[method].fields_by_number.items()}
            try:
                self._look(raw, names)
            except InvalidRequest as error:
                self._refused(error, is_generate=method.endswith("/Generate"))
                raise

    def check(self, request: object) -> None:
        """InvalidRequest for a request whose lists are too long."""
        if isinstance(request, inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest):
            try:
                convert.refuse_giant(request, bounds=self._bounds, limits=self._served.limits())
            except InvalidRequest as error:
                self._refused(error, is_generate=isinstance(request, inference_pb2.GenerateRequest))
                raise

    def _look(self, raw: bytes, names: dict[int, str]) -> None:
        most, num_messages, num_others = self._bounds.max_messages, 0, 0
        for number, num_bytes in outermost_fields(raw):
            name = names.get(number, "")
            if name == "messages":
                num_messages += 1
                if num_messages > most:
                    raise InvalidRequest("messages", f"more than {most} messages", f"at most {most} messages")
                continue
            num_others += 1
            if num_others > _MAX_OTHER_FIELDS:
                raise InvalidRequest(
                    "request", f"more than {_MAX_OTHER_FIELDS} fields", "lists of ids as packed fields"
                )
            if name == "text":
                convert.check_bytes("text", num_bytes, self._bounds)
            elif name == "sampling" and num_bytes > _MAX_SAMPLING_BYTES:
                allowed = (
                    f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids, {MAX_LOGIT_BIAS} tokens in logit_bias and "
                    f"{MAX_GRAMMAR_BYTES} bytes of a form"
                )
                raise InvalidRequest("sampling", f"more than {_MAX_SAMPLING_BYTES} bytes", allowed)

    def _refused(self, error: InvalidRequest, *, is_generate: bool) -> None:
        if is_generate:
            self._metrics.requests.labels(code_of(error).name).inc()
        log.info("request refused", extra={"fields": {"field": error.field, "value": error.value}})


def outermost_fields(raw: bytes) -> Iterator[tuple[int, int]]:
    """Number and size of each field of a protobuf message, not of those inside it. Ends early where the bytes make no
    sense, or have a group: decoding will say."""
    at, end = 0, len(raw)
    try:
        while at < end:
            tag, at = _varint(raw, at)
            kind = tag & 7
            if kind == 2:
                num_bytes, at = _varint(raw, at)
            elif kind == 0:
                num_bytes = _varint(raw, at)[1] - at
            elif kind in (1, 5):
                num_bytes = 8 if kind == 1 else 4
            else:
                return
            at += num_bytes
            yield tag >> 3, num_bytes
    except IndexError:
        return


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends; IndexError if it does not, or is none of 64 bits."""
    number = 0
    for shift in range(0, 70, 7):
        part = raw[at]
        at += 1
        number |= (part & 0x7F) << shift
        if part < 0x80:
            return number, at
    raise IndexError
