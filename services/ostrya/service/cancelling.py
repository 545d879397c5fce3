"""Whom a CancelledError means: grpc.aio raises it too, in whoever waits for a call or channel that another closed."""

import asyncio


def is_cancelled() -> bool:
    """Whether somebody wants the running task itself to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
