"""Streams that are opened and reset at once: they wait within bounds, and others are answered meanwhile."""

import asyncio

from support.cluster.in_process import Bench, eventually
from support.http2.client import raw_client

from baton.inference.v1 import generate_pb2 as pb
from router.config import RouterConfig
from runtime.aio import timeout
from services.config import WorkerConfig

GENERATE = "/baton.inference.v1.InferenceService/Generate"
CANCEL = 8


async def test_a_client_is_told_how_many_streams_it_may_open(pair: Bench) -> None:
    request = pb.GenerateRequest(prompt="x", stopping={"max_tokens": 1})
    async with raw_client(pair.address) as client:
        await client.call(GENERATE, request.SerializeToString())
        told = client.connection.remote_settings.max_concurrent_streams
    assert told == RouterConfig().connections.max_streams == 256


def test_routers_may_open_more_streams_to_a_worker_than_clients_to_a_router() -> None:
    assert WorkerConfig.model_fields["connections"].default.max_streams == 4096
    # Also where another key of the section is given.
    router = RouterConfig.model_validate({"connections": {"max_message_bytes": 2048}})
    assert router.connections.max_streams == 256


async def test_others_are_answered_while_a_client_resets_thousands_of_streams(on_grpcio: Bench) -> None:
    # Ours ends such a connection: tests/http2.
    request = pb.GenerateRequest(prompt="x" * 20, stopping={"max_tokens": 400})
    message = request.SerializeToString()
    frame = b"\0" + len(message).to_bytes(4, "big") + message
    async with timeout(60), raw_client(on_grpcio.address) as client:
        # A client that answers no PING is left after 3 s.
        answering = asyncio.ensure_future(client.answer())
        for _ in range(40):
            for _ in range(50):
                stream = client.begin(GENERATE)
                client.connection.send_data(stream, frame, end_stream=True)
                client.connection.reset_stream(stream, CANCEL)
            await client.flush()
            assert await on_grpcio.text_of(prompt="x", stopping={"max_tokens": 3})
        assert not answering.done()
        answering.cancel()
    await eventually(lambda: on_grpcio.used_blocks() == 0)
