"""The writing side of a stream, with clients that read fast, slowly, or not at all."""

import asyncio

import pytest
from baton.inference.v1 import generate_pb2

from router.answer import Piece
from router.outbox import Outbox
from rpc.aio import timeout
from rpc.errors import SlowReader


class Client:
    """Takes messages while `reading` is set."""

    def __init__(self) -> None:
        self.messages: list[generate_pb2.GenerateResponse] = []
        self.reading = asyncio.Event()
        self.reading.set()

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        await self.reading.wait()
        self.messages.append(message)

    @property
    def sizes(self) -> list[int]:
        return [len(message.token.token_ids) for message in self.messages]


def token(token_id: int) -> Piece:
    return Piece(chr(token_id), [token_id], [])


async def add(client: Client, count: int, then: BaseException | None = None) -> None:
    """A request that adds tokens, and fails if it is given an error."""
    async with Outbox("r", client.send, 100) as outbox:
        for token_id in range(65, 65 + count):
            await outbox.put(token(token_id))
            await settle()
        if then:
            raise then


async def settle() -> None:
    """Lets every task that can run, run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_token_that_comes_alone_goes_out_alone_and_at_once() -> None:
    client = Client()
    async with Outbox("r", client.send, 100) as outbox:
        for token_id in (65, 66):
            await outbox.put(token(token_id))
            await settle()
    assert client.sizes == [1, 1]


async def test_all_that_waits_goes_out_in_one_message() -> None:
    client = Client()
    client.reading.clear()
    async with Outbox("r", client.send, 100) as outbox:
        for token_id in range(65, 75):
            await outbox.put(token(token_id))
            await settle()
        client.reading.set()
    assert client.sizes == [1, 9]
    assert client.messages[1].token.text == "BCDEFGHIJ"


async def test_started_tokens_and_finished_keep_their_order() -> None:
    client = Client()
    client.reading.clear()
    async with Outbox("r", client.send, 100) as outbox:
        outbox.start(generate_pb2.Started(model="m"))
        await outbox.put(token(65))
        outbox.finish("!", generate_pb2.Finished)
        client.reading.set()
    assert [message.WhichOneof("event") for message in client.messages] == ["started", "token", "finished"]
    assert [message.sequence for message in client.messages] == [0, 1, 2]
    assert client.messages[1].token.text == "A!"


async def test_whoever_adds_waits_while_the_client_is_too_far_behind() -> None:
    client = Client()
    client.reading.clear()

    async def add_many(outbox: Outbox) -> None:
        for token_id in range(65, 85):
            await outbox.put(token(token_id))

    async with Outbox("r", client.send, 5) as outbox:
        adding = asyncio.create_task(add_many(outbox))
        await settle()
        assert not adding.done()
        client.reading.set()
        await adding
    assert sum(client.sizes) == 20
    assert max(client.sizes) <= 5


async def test_after_a_failure_what_waits_is_still_written() -> None:
    client = Client()
    with pytest.raises(ValueError, match="engine"):
        await add(client, 1, then=ValueError("engine"))
    assert client.sizes == [1]


async def test_a_client_that_never_reads_does_not_hold_a_failure_back_for_long() -> None:
    client = Client()
    client.reading.clear()
    async with timeout(5):
        with pytest.raises(ValueError, match="engine"):
            await add(client, 1, then=ValueError("engine"))


async def test_after_a_cancellation_what_waits_is_dropped() -> None:
    client = Client()
    client.reading.clear()
    with pytest.raises(asyncio.CancelledError):
        await add(client, 1, then=asyncio.CancelledError())
    client.reading.set()
    await settle()
    assert client.sizes == []


async def test_what_writing_raises_is_raised_to_whoever_adds() -> None:
    class Gone(Client):
        async def send(self, message: generate_pb2.GenerateResponse) -> None:
            raise RuntimeError("the stream is over")

    with pytest.raises(RuntimeError, match="the stream is over"):
        await add(Gone(), 5)


async def test_a_client_that_reads_nothing_for_too_long_ends_the_request() -> None:
    client = Client()
    client.reading.clear()

    async def add_many() -> None:
        async with Outbox("r", client.send, 5, 0.1) as outbox:
            for token_id in range(65, 85):
                await outbox.put(token(token_id))

    async with timeout(5):
        with pytest.raises(SlowReader, match=r"0\.1 s"):
            await add_many()


async def test_a_client_that_does_not_read_the_end_is_not_waited_for_longer() -> None:
    client = Client()
    client.reading.clear()
    async with timeout(5):
        with pytest.raises(SlowReader):
            async with Outbox("r", client.send, 100, 0.1) as outbox:
                outbox.finish("", generate_pb2.Finished)


async def test_a_model_that_is_slow_is_not_the_reader_s_fault() -> None:
    client = Client()
    async with Outbox("r", client.send, 100, 0.1) as outbox:
        await outbox.put(token(65))
        await asyncio.sleep(0.2)
        client.reading.clear()
        await outbox.put(token(66))
        asyncio.get_running_loop().call_later(0.05, client.reading.set)
    assert client.sizes == [1, 1]
