"""Talk to an Ostrya router from Python: `Client`, or `AsyncClient` inside an event loop.

Errors are those of ostrya.errors. A stream that is closed, left by its `with` block or garbage collected cancels its
request on the server. Built on the stubs in ostrya.api; knows nothing of routers, workers or Redis.
"""

from ostrya.client.aio import AsyncClient, AsyncStream
from ostrya.client.answer import Chunk, FinishReason, TokenLogprobs, Usage
from ostrya.client.request import GenerateOptions, Message, StructuredOutput
from ostrya.client.sync import Client, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "FinishReason",
    "GenerateOptions",
    "Message",
    "Stream",
    "StructuredOutput",
    "TokenLogprobs",
    "Usage",
]
