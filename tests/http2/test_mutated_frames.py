"""Conversations with mutated frames: no exception gets out, none holds the server up, nothing is left of them.

A few thousand frames here; `make fuzz-http2`, or BATON_HTTP2_FRAMES, sends more.
"""

import asyncio
import gc
import os
import random
import resource

import h2.config
import h2.connection
import h2.events
import hypothesis
import pytest
from hypothesis import strategies as st
from support.http2.fuzz import conversation, mutated, wire
from support.http2.peer import head, message
from support.http2.pipe import converse, failures_of, kinds_of_frames
from support.http2.server import Echoing, echoing

from baton_http2.server.connection import Connection

FRAMES = int(os.environ.get("BATON_HTTP2_FRAMES", "20000"))
MEMORY_BYTES = 64 * 2**20


@pytest.mark.timeout(0)
async def test_mutated_frames_do_no_harm() -> None:
    seed = random.randrange(2**32)
    source = random.Random(seed)
    failures = failures_of(asyncio.get_running_loop())
    async with echoing() as server:
        sent, memory = 0, 0
        while sent < FRAMES:
            frames = mutated(source, conversation(source, source.randrange(1, 6)))
            data = wire(frames)
            cuts = sorted(source.randrange(len(data)) for _ in range(source.randrange(3)))
            await converse(Connection(server.server.connections), data, cuts)
            sent += len(frames)
            assert not failures, f"seed {seed}, after {sent} frames: {failures}"
            memory = memory or (sent > 5000 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        await _settle(server)
        assert not server.server.calls.tasks, f"seed {seed}"
        assert not server.server.connections.open, f"seed {seed}"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - memory < MEMORY_BYTES, f"seed {seed}"
        await _still_serves(server)


async def _settle(server: Echoing) -> None:
    for _ in range(1000):
        if not server.server.calls.tasks:
            break
        await asyncio.sleep(0.01)
    gc.collect()


async def _still_serves(server: Echoing) -> None:
    pipe = await converse(Connection(server.server.connections), wire(conversation(random.Random(3), 1)), [])
    assert not pipe.is_closed


@hypothesis.given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=4))
@hypothesis.settings(max_examples=300, deadline=None)
def test_any_bytes_after_the_preface_do_no_harm(data: bytes, cuts: list[int]) -> None:
    async def run() -> None:
        failures = failures_of(asyncio.get_running_loop())
        async with echoing() as server:
            whole = wire([b"\0\0\0\4\0\0\0\0\0", data])
            await converse(Connection(server.server.connections), whole, sorted(min(cut, len(whole)) for cut in cuts))
        assert failures == []

    asyncio.run(run())


frames = st.builds(
    lambda kind, flags, stream, payload: (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    ),
    st.integers(0, 10),
    st.sampled_from([0, 1, 4, 5, 8, 9, 0x20, 0x2D, 0xFF]),
    st.sampled_from([0, 1, 2, 3, 5, 2**31 - 1]),
    st.binary(max_size=40),
)


@hypothesis.given(st.lists(frames, max_size=12))
@hypothesis.settings(max_examples=300, deadline=None)
def test_any_frames_are_answered_with_frames_that_h2_understands(sent: list[bytes]) -> None:
    """Whatever is sent after a call, our answers are valid, as a strict client reads them."""

    async def run() -> None:
        failures = failures_of(asyncio.get_running_loop())
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        client.initiate_connection()
        client.send_headers(1, head("unary"))
        client.send_data(1, message(b"hello"), end_stream=True)
        async with echoing() as server:
            valid = await converse(Connection(server.server.connections), client.data_to_send(), [])
            events = client.receive_data(valid.written)
            assert any(isinstance(event, h2.events.StreamEnded) for event in events)
            start = wire([b"\0\0\0\4\0\0\0\0\0"])
            pipe = await converse(Connection(server.server.connections), start + b"".join(sent), [])
            assert kinds_of_frames(pipe.written) <= {0, 1, 3, 4, 6, 7, 8}
        assert failures == []

    asyncio.run(run())
