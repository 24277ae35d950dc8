"""The memory that a router takes for compressed requests that come together and are large when they are plain."""

import gzip
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.http2.peer import Peer, head, message, peer_of

from baton.inference.v1 import generate_pb2
from baton_http2.input_budget import InputLimits
from benchmarks.processes import child, received, run_router
from router.config import RouterConfig

MIB = 2**20
UNAVAILABLE = 14  # there is no worker
CALLS, CONNECTIONS = 8, 4
GENERATE = "/baton.inference.v1.InferenceService/Generate"
ROUTER = RouterConfig.model_validate(
    {
        "listen": "127.0.0.1:0",
        "metrics_listen": "127.0.0.1:0",
        "drain_seconds": 0,
        "connections": {"compressed_requests": True},
    }
)
TEXT = generate_pb2.GenerateRequest(prompt="x" * (63 * MIB))
# Below the limit of one text, so that it is parsed whole.
PICTURES = generate_pb2.GenerateRequest(media=[{"data": bytes(26 * MIB)}] * 2)


def call(peer: Peer, stream_id: int, content: bytes) -> bytes:
    """The frames of a call whose message is `content`, compressed."""
    block = peer.block(head(GENERATE, ("grpc-encoding", "gzip"), path=GENERATE))
    body = message(content, compressed=1)
    pieces = [body[at : at + 16_000] for at in range(0, len(body), 16_000)]
    frames = [frame(1, 4, stream_id, block), *(frame(0, 0, stream_id, piece) for piece in pieces)]
    return b"".join([*frames, frame(0, 1, stream_id, b"")])


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


def memory(pid: int, name: str) -> int:
    """A line of the status of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@pytest.mark.parametrize("large", [TEXT, PICTURES], ids=["text", "pictures"])
async def test_compressed_requests_take_no_more_than_the_budget_of_input(large: generate_pb2.GenerateRequest) -> None:
    content = gzip.compress(large.SerializeToString(), compresslevel=1)
    async with AsyncExitStack() as stack:
        router, pid = await stack.enter_async_context(child(run_router, ROUTER))
        router.send([])
        port = int((await received(router)).rpartition(":")[2])
        peers = [await stack.enter_async_context(peer_of(port)) for _ in range(CONNECTIONS)]
        before = memory(pid, "VmRSS")
        streams = [(peers[number % CONNECTIONS], 1 + 2 * (number // CONNECTIONS)) for number in range(CALLS)]
        for peer, stream_id in streams:
            await peer.send(call(peer, stream_id, content))
        statuses = {(await peer.ended(stream_id)).status for peer, stream_id in streams}
        assert statuses == {UNAVAILABLE}
        # At least one was whole in memory, and never many.
        assert 60 * MIB < memory(pid, "VmHWM") - before < InputLimits().process_bytes
