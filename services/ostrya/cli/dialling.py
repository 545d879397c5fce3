"""Whether a worker answers at its address: routers tell that it is lost, not whether it hangs. Used by probes.py."""

import asyncio

import grpc

from ostrya.api.v1 import worker_pb2, worker_pb2_grpc
from ostrya.cli.diagnosis.facts import Dialled

MAX_TIMEOUT_S = 3.0
"""A worker answers from memory, whatever its engine does."""


async def dial(address: str, timeout_s: float) -> Dialled:
    """Never an exception. A process that was stopped still has its connections accepted, by the kernel."""
    timeout_s = min(timeout_s, MAX_TIMEOUT_S)
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
    except ConnectionRefusedError:
        return Dialled.REFUSED
    except (OSError, ValueError, OverflowError):  # a timeout too; from here many a worker cannot be reached
        return Dialled.UNREACHABLE
    async with grpc.aio.insecure_channel(address) as channel:
        worker: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            await worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return Dialled.SILENT if is_late else Dialled.UNREACHABLE
    return Dialled.ANSWERS
