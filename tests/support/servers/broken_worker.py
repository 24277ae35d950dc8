"""A worker with broken replies beside the healthy ones of a bench, and the requests that it gets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.cluster.in_process import FAST_ROUTER, Bench, Stream, simulated
from support.servers.tampering import Tampered, tampered

from baton.engine.v1 import decode_pb2
from router.config import RetryConfig, RouterConfig
from services.config import HandoffConfig

SEEDED = {"temperature": 1.0, "seed": 3}
LONG = {"prompt": "hello", "sampling": SEEDED, "stopping": {"max_tokens": 60}}
PATIENT = FAST_ROUTER.model_copy(update={"retry": RetryConfig(wait_seconds=0)})
# Long enough for a healthy worker on a busy machine.
IMPATIENT = FAST_ROUTER.model_copy(
    update={"retry": RetryConfig(answer_seconds=3.0, silence_seconds=3.0, wait_seconds=0)}
)


def router_for(name: str) -> RouterConfig:
    """One that waits for answers, unless they are not to come."""
    return IMPATIENT if name.startswith("silence") else PATIENT


def tokens(*ids: int) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(tokens=decode_pb2.DecodedTokens(token_ids=ids))


LANES = pytest.mark.parametrize("multiplexed", [False, True], ids=["calls", "multiplexed"])


@asynccontextmanager
async def beside(running: Bench, role: str, *, multiplexed: bool) -> AsyncIterator[Tampered]:
    """A broken worker beside the bench's."""
    # Blocks of a changed reply are not released: a short lease.
    config = simulated("broken", role).model_copy(update={"handoff": HandoffConfig(lease_seconds=0.5)})
    async with tampered(running, config, multiplexed=multiplexed) as broken:
        yield broken


async def asked_until_called(running: Bench, broken: Tampered, method: str, expected: Stream) -> Stream:
    """The first answer for which the broken worker was called. All are as they should be."""
    for _ in range(50):
        before = broken.calls[method]
        stream = await running.generate(**LONG)
        assert stream.token_ids == expected.token_ids
        assert stream.text == expected.text
        assert [message.sequence for message in stream.messages] == list(range(len(stream.messages)))
        if broken.calls[method] > before:
            return stream
    raise AssertionError("the broken worker was never called")
