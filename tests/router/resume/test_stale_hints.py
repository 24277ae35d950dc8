"""An answer whose handle names a worker that has none of it, or an older decode: it goes on where its latest one is."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from support.clients.resuming import Received
from support.cluster.router_pair import Pair, kept_request, read, router_pair
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import stream
from baton.engine.v1 import decode_pb2_grpc
from baton.inference.v1 import generate_pb2
from router.resume.handle import Handle
from rpc.channels import open_channel
from services.resume.stream import KeptStream
from services.worker import Worker

_REQUEST = kept_request(stopping={"max_tokens": 300})


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with router_pair("prefill+decode", "prefill+decode") as found:
        yield found
        await eventually(lambda: found.running.used_blocks() == 0)


async def _begun(pair: Pair) -> tuple[Received, KeptStream, Worker]:
    """An answer that no router reads any more, its decode, and the worker that does not have it."""
    received = await read(pair.first.Generate(_REQUEST, timeout=PATIENCE_SECONDS), Received(_REQUEST), until=10)
    first, second = pair.running.workers.values()
    other = second if first.kept.streams else first
    [kept] = [*first.kept.streams, *second.kept.streams]
    return received, kept, other


async def _expected(pair: Pair) -> Received:
    request = generate_pb2.GenerateRequest()
    request.CopyFrom(_REQUEST)
    request.response.ClearField("keep")
    return await read(pair.first.Generate(request, timeout=PATIENCE_SECONDS), Received(request))


async def _decode_again(kept: KeptStream, worker: Worker, ids: list[int]) -> None:
    """Begins the next decode of an answer on another worker, as a router does that has lost its own; then leaves."""
    asked = kept.kept.read()
    asked.request_id, asked.keep.hop = kept.kept.request_id, asked.keep.hop + 1
    asked.prompt.MergeFromString(kept.kept.prompt)
    asked.emitted.extend(ids)
    async with open_channel(worker.address) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        async with aclosing(stream(stub.Decode(asked, timeout=PATIENCE_SECONDS))) as responses:
            async for response in responses:
                if response.WhichOneof("event") == "tokens":
                    return


async def test_a_handle_that_names_a_worker_without_the_answer_finds_it(pair: Pair) -> None:
    expected = await _expected(pair)
    received, _, other = await _begun(pair)
    received.handle = Handle.parse(received.handle).at(other.worker_id).text
    await read(pair.second.ResumeGeneration(received.resume(), timeout=PATIENCE_SECONDS), received)
    assert received.whole == expected.whole
    assert [one.recomputed for one in received.resumed] == [False]


async def test_the_latest_decode_goes_on_and_an_older_one_at_the_named_worker_is_left(pair: Pair) -> None:
    expected = await _expected(pair)
    received, older, other = await _begun(pair)
    older.ids[5] ^= 1  # as another batch may have drawn it
    await _decode_again(older, other, expected.ids[0][:20])
    await read(pair.second.ResumeGeneration(received.resume(), timeout=PATIENCE_SECONDS), received)
    assert received.whole == expected.whole
    [resumed] = received.resumed
    assert Handle.parse(resumed.started.resumption.handle).hints_at(other.worker_id)
    assert older.is_parked
