"""The stream writer, with clients that read fast, slowly, or not at all."""

import asyncio

import pytest
from support.clock import ManualClock
from support.eventually import eventually

from baton.errors import SlowReader
from baton.inference.v1 import generate_pb2
from baton_http2.server.reply import Reply
from router.stream.general import Pace
from router.stream.writer import StreamWriter
from router.text.completion import TokenDelta
from runtime.aio import timeout


class Client:
    """Takes messages while `reading` is set. With `at_once` its server can send without waiting."""

    at_once = False

    def __init__(self) -> None:
        self.messages: list[generate_pb2.GenerateResponse] = []
        self.reading = asyncio.Event()
        self.reading.set()

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        await self.reading.wait()
        self.messages.append(message)

    @property
    def connection(self) -> "Client":
        return self

    def write(self, message: bytes) -> bool:
        self.messages.append(generate_pb2.GenerateResponse.FromString(message))
        return self.reading.is_set()

    def flush(self) -> None:
        """Nothing waits."""

    @property
    def reply(self) -> Reply:
        return Reply(self.send, lambda _: None, lambda: self if self.at_once else None)

    @property
    def sizes(self) -> list[int]:
        return [len(message.token.token_ids) for message in self.messages]


@pytest.fixture
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """True if the server can write at once; false if it waits while it writes."""
    monkeypatch.setattr(Client, "at_once", request.param)


on_both = pytest.mark.parametrize("at_once", [False, True], indirect=True)


def token(token_id: int) -> TokenDelta:
    return TokenDelta(chr(token_id), [token_id], [])


async def add(client: Client, count: int, then: BaseException | None = None) -> None:
    """A request that adds tokens, and fails if it is given an error."""
    async with StreamWriter("r", client.reply, 100) as writer:
        for token_id in range(65, 65 + count):
            await writer.put(token(token_id))
            await let_tasks_run()
        if then:
            raise then


async def let_tasks_run() -> None:
    """Lets every task that can run, run."""
    for _ in range(10):
        await asyncio.sleep(0)


@on_both
@pytest.mark.usefixtures("at_once")
async def test_a_token_that_comes_alone_goes_out_alone_and_at_once() -> None:
    client = Client()
    async with StreamWriter("r", client.reply, 100) as writer:
        for token_id in (65, 66):
            await writer.put(token(token_id))
            await let_tasks_run()
    assert client.sizes == [1, 1]


async def test_all_that_waits_goes_out_in_one_message() -> None:
    client = Client()
    client.reading.clear()
    async with StreamWriter("r", client.reply, 100) as writer:
        for token_id in range(65, 75):
            await writer.put(token(token_id))
            await let_tasks_run()
        client.reading.set()
    assert client.sizes == [1, 9]
    assert client.messages[1].token.text == "BCDEFGHIJ"


@on_both
@pytest.mark.usefixtures("at_once")
async def test_started_tokens_and_finished_keep_their_order() -> None:
    client = Client()
    client.reading.clear()
    async with StreamWriter("r", client.reply, 100) as writer:
        writer.start(generate_pb2.Started(model="m"))
        await writer.put(token(65))
        writer.finish(TokenDelta("!"), lambda _finished: None)
        client.reading.set()
    assert [message.WhichOneof("event") for message in client.messages] == ["started", "token", "finished"]
    assert [message.sequence for message in client.messages] == [0, 1, 2]
    assert client.messages[1].token.text == "A!"


@on_both
@pytest.mark.usefixtures("at_once")
async def test_adding_waits_while_the_client_is_too_far_behind() -> None:
    client = Client()
    client.reading.clear()

    async def add_many(writer: StreamWriter) -> None:
        for token_id in range(65, 85):
            await writer.put(token(token_id))

    async with StreamWriter("r", client.reply, 5) as writer:
        adding = asyncio.create_task(add_many(writer))
        await let_tasks_run()
        assert not adding.done()
        client.reading.set()
        await adding
    assert sum(client.sizes) == 20
    assert max(client.sizes) <= 5


@on_both
@pytest.mark.usefixtures("at_once")
async def test_after_a_failure_what_waits_is_still_written() -> None:
    client = Client()
    with pytest.raises(ValueError, match="engine"):
        await add(client, 1, then=ValueError("engine"))
    assert client.sizes == [1]


@on_both
@pytest.mark.usefixtures("at_once")
async def test_a_client_that_never_reads_does_not_hold_a_failure_back_for_long() -> None:
    client = Client()
    client.reading.clear()
    async with timeout(50):
        with pytest.raises(ValueError, match="engine"):
            await add(client, 1, then=ValueError("engine"))


async def test_after_a_cancellation_what_waits_is_dropped() -> None:
    client = Client()
    client.reading.clear()
    with pytest.raises(asyncio.CancelledError):
        await add(client, 1, then=asyncio.CancelledError())
    client.reading.set()
    await let_tasks_run()
    assert client.sizes == []


async def test_what_writing_raises_is_raised_when_adding() -> None:
    class Gone(Client):
        async def send(self, message: generate_pb2.GenerateResponse) -> None:
            raise RuntimeError("the stream is over")

    with pytest.raises(RuntimeError, match="the stream is over"):
        await add(Gone(), 5)


@on_both
@pytest.mark.usefixtures("at_once")
async def test_a_client_that_reads_nothing_for_too_long_ends_the_request() -> None:
    client = Client()
    client.reading.clear()

    async def add_many() -> None:
        async with StreamWriter("r", client.reply, 5, 0.1) as writer:
            for token_id in range(65, 85):
                await writer.put(token(token_id))

    async with timeout(50):
        with pytest.raises(SlowReader, match=r"0\.1 s"):
            await add_many()


async def test_a_client_that_does_not_read_the_end_is_not_waited_for_longer() -> None:
    client = Client()
    client.reading.clear()
    async with timeout(50):
        with pytest.raises(SlowReader):
            async with StreamWriter("r", client.reply, 100, 0.1) as writer:
                writer.finish(TokenDelta(""), lambda _finished: None)


async def answer_slowly(client: Client, clock: ManualClock) -> None:
    """A token, ten minutes without one, and a second one while the client does not read."""
    async with StreamWriter("r", client.reply, 100, 60.0, clock=clock) as writer:
        await writer.put(token(65))
        await let_tasks_run()
        clock.advance(600)
        client.reading.clear()
        await writer.put(token(66))


@on_both
@pytest.mark.usefixtures("at_once")
async def test_a_model_that_is_slow_is_not_the_reader_s_fault() -> None:
    client, clock = Client(), ManualClock()
    answering = asyncio.create_task(answer_slowly(client, clock))
    await eventually(lambda: not client.reading.is_set())
    await let_tasks_run()
    client.reading.set()
    await answering
    assert client.sizes == [1, 1]


@on_both
@pytest.mark.usefixtures("at_once")
async def test_later_tokens_come_together_and_the_first_one_at_once() -> None:
    client = Client()
    async with StreamWriter("r", client.reply, 100, pace=Pace(4, 60.0)) as writer:
        for token_id in range(65, 75):
            await writer.put(token(token_id))
            await let_tasks_run()
        assert client.sizes == [1, 4, 4]
        writer.finish(TokenDelta("!"), lambda _finished: None)
    assert client.sizes == [1, 4, 4, 1, 0]
    assert "".join(message.token.text for message in client.messages) == "ABCDEFGHIJ!"


@on_both
@pytest.mark.usefixtures("at_once")
async def test_tokens_that_wait_for_others_are_sent_after_the_longest_delay() -> None:
    client = Client()
    async with StreamWriter("r", client.reply, 100, pace=Pace(50, 0.05)) as writer:
        for token_id in range(65, 69):
            await writer.put(token(token_id))
        await eventually(lambda: client.sizes[-1:] == [3] or sum(client.sizes) == 4)


@on_both
@pytest.mark.usefixtures("at_once")
async def test_tokens_that_wait_for_others_are_sent_when_the_request_fails() -> None:
    client = Client()

    async def fail() -> None:
        async with StreamWriter("r", client.reply, 100, pace=Pace(50, 60.0)) as writer:
            for token_id in range(65, 69):
                await writer.put(token(token_id))
                await let_tasks_run()
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  # the test's own
        await fail()
    assert client.sizes == [1, 3]


@on_both
@pytest.mark.usefixtures("at_once")
async def test_a_pace_beyond_what_may_wait_does_not_hold_up_the_request() -> None:
    client = Client()
    async with timeout(10), StreamWriter("r", client.reply, 5, pace=Pace(50, 60.0)) as writer:
        for token_id in range(65, 76):
            await writer.put(token(token_id))
            await let_tasks_run()
    assert client.sizes == [1, 5, 5]
