"""Two routers before the same workers, and answers that are kept for either of them."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from support.clients.resuming import Received
from support.cluster.in_process import FAST_ROUTER, Bench, bench, simulated
from support.eventually import eventually

from baton.calls import stream
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from router.server import Router, host_router
from rpc.channels import open_channel
from runtime.aio import timeout

_GRACE = {"seconds": 3}


@dataclass
class Pair:
    """Two routers before the same workers."""

    running: Bench
    other: Router
    first: inference_service_pb2_grpc.InferenceServiceStub
    second: inference_service_pb2_grpc.InferenceServiceStub


@asynccontextmanager
async def router_pair(*roles: str, **engine: Any) -> AsyncIterator[Pair]:
    settings = {"decode_step_seconds": 0.002, **engine}
    configs = [simulated(f"worker-{number}", *role.split("+"), **settings) for number, role in enumerate(roles)]
    async with (
        timeout(50),
        bench(*configs, proxied=False) as running,
        host_router(FAST_ROUTER, running.registry) as other,
    ):
        await eventually(lambda: sum(not worker.problem for worker in other.cluster.workers) == len(configs))
        async with open_channel(other.address) as channel:
            yield Pair(running, other, running.stub, inference_service_pb2_grpc.InferenceServiceStub(channel))


def kept_request(**fields: Any) -> generate_pb2.GenerateRequest:
    given: dict[str, Any] = {"prompt": "resume me", "sampling": {"seed": 5, "temperature": 0.8}, **fields}
    response = {**given.pop("response", {}), "keep": _GRACE}
    stopping = {"max_tokens": 80, "ignore_eos": True, **given.pop("stopping", {})}
    return generate_pb2.GenerateRequest(response=response, stopping=stopping, **given)


async def read(call: Any, received: Received, until: int = 10**9) -> Received:
    async with aclosing(stream(call)) as messages:
        async for message in messages:
            received.add(message)
            if received.tokens >= until:
                break
    return received
