"""A server's answers with mutated frames, to our own client: each call ends with a status, and nothing is left of it.

A few thousand frames here; `make fuzz-http2`, or BATON_HTTP2_FRAMES, sends more.
"""

import asyncio
import gc
import os
import random
import resource
import weakref
from dataclasses import dataclass, field

import hypothesis
import pytest
from grpc import StatusCode
from hypothesis import strategies as st
from support.http2.fuzz import answers, mutated
from support.http2.pipe import Pipe, converse, failures_of, kinds_of_frames

from baton_http2.client.call import Status
from baton_http2.client.connection import ClientConnection
from baton_http2.client.dialing import DEFAULT_LIMITS, ServerAddress

FRAMES = int(os.environ.get("BATON_HTTP2_FRAMES", "20000"))
MEMORY_BYTES = 64 * 2**20
PREFACE_BYTES = 24
HEAD = ServerAddress("127.0.0.1:1").head("/test.Service/Method")


@dataclass(slots=True)
class Conversation:
    """A call whose server sends what a test says."""

    messages: list[bytes] = field(default_factory=list)
    connections: "weakref.WeakSet[ClientConnection]" = field(default_factory=weakref.WeakSet)

    async def answered(self, data: bytes, cuts: list[int]) -> tuple[Status, Pipe]:
        """The end of a call that writes much more than the windows allow."""
        connection = ClientConnection(HEAD, self.messages.append, DEFAULT_LIMITS)
        self.connections.add(connection)
        writing: list[asyncio.Task[None]] = []

        class Writing(asyncio.Protocol):
            """The same connection; its caller begins to write as soon as there is a call."""

            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                connection.connection_made(transport)
                writing.append(asyncio.ensure_future(_write(connection)))

            data_received = staticmethod(connection.data_received)
            connection_lost = staticmethod(connection.connection_lost)

        pipe = await converse(Writing(), data, cuts)
        await asyncio.wait_for(writing[0], 30)
        assert connection.call.status.done()
        assert connection.closed.done()
        return connection.call.status.result(), pipe


async def _write(connection: ClientConnection) -> None:
    for _ in range(20):
        await connection.call.write(bytes(30_000))


@pytest.mark.timeout(0)
async def test_mutated_answers_end_a_call_and_do_no_harm() -> None:
    seed = random.randrange(2**32)
    source = random.Random(seed)
    failures = failures_of(asyncio.get_running_loop())
    conversation, sent, memory, codes = Conversation(), 0, 0, set()
    while sent < FRAMES:
        frames = mutated(source, answers(source))
        data = b"".join(frames)
        cuts = sorted(source.randrange(len(data)) for _ in range(source.randrange(3)))
        status, pipe = await conversation.answered(data, cuts)
        codes.add(status.code())
        kinds_of_frames(pipe.written[PREFACE_BYTES:])
        conversation.messages.clear()
        sent += len(frames)
        assert not failures, f"seed {seed}, after {sent} frames: {failures}"
        memory = memory or (sent > 5000 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    assert {StatusCode.OK, StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.UNKNOWN} <= codes
    gc.collect()
    # Not the set itself: what tells it of the dead is not called for compiled connections.
    assert not list(conversation.connections), f"seed {seed}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - memory < MEMORY_BYTES, f"seed {seed}"


async def test_answers_that_are_not_mutated_are_understood() -> None:
    source = random.Random(5)
    for _ in range(200):
        frames = answers(source)
        data = b"".join(frames)
        status, _ = await Conversation().answered(data, [])
        is_whole = not any(frame[3] in (3, 7) for frame in frames) and frames[-1][4] & 1
        assert status.code() is StatusCode.OK or not is_whole, status


@hypothesis.given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=4))
@hypothesis.settings(max_examples=200, deadline=None)
def test_any_bytes_end_the_call(data: bytes, cuts: list[int]) -> None:
    async def run() -> None:
        failures = failures_of(asyncio.get_running_loop())
        whole = b"\0\0\0\4\0\0\0\0\0" + data
        status, _ = await Conversation().answered(whole, sorted(min(cut, len(whole)) for cut in cuts))
        assert status.code() is not StatusCode.OK
        assert failures == []

    asyncio.run(run())
