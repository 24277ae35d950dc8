"""The messages of a stream of calls: the ends of calls go out with their last tokens, and delay others little."""

import asyncio
from collections.abc import Callable, Sequence

from grpc import StatusCode

from baton.engine.v1 import multiplex_pb2 as pb
from baton.errors import EngineFailed
from engine_protocol.multiplex.response_queue import CallTokens, ResponseQueue
from runtime.aio import timeout


class Ids:
    """A source of given ids, all there at once."""

    def __init__(self, *ids: int, is_last: bool) -> None:
        self.ids = ids
        self.is_last = is_last

    async def subscribe(self, ready: Callable[[], None]) -> None:
        ready()

    def pull(self) -> tuple[Sequence[int], bool]:
        return self.ids, self.is_last


class Counted:
    """A source of the numbers from 1 on, one for each pull."""

    def __init__(self) -> None:
        self.pulled = 0
        self.subscribed = asyncio.Event()

    async def subscribe(self, ready: Callable[[], None]) -> None:
        self.subscribed.set()

    def pull(self) -> tuple[Sequence[int], bool]:
        self.pulled += 1
        return (self.pulled,), False


class Failing(Counted):
    def pull(self) -> tuple[Sequence[int], bool]:
        raise EngineFailed("it is broken")


class Ended:
    def record_sent(self) -> None:
        """Not looked at."""

    def record_lost(self) -> None:
        """Not looked at."""


async def finish(queue: ResponseQueue, tokens: CallTokens) -> None:
    """The end of a servicer after its last token: it waits for others, says how it was, and ends."""
    await tokens.done
    queue.add(tokens.call, b"finished")
    await asyncio.sleep(0)
    queue.end(tokens.call, pb.CallStatus(code=StatusCode.OK.value[0]), Ended())


async def test_the_last_tokens_of_a_call_its_last_answer_and_its_status_are_one_message() -> None:
    queue = ResponseQueue()
    tokens = CallTokens(queue, 1, Ids(7, 8, is_last=True), is_paused=False)
    ending = asyncio.create_task(finish(queue, tokens))
    tokens.mark_ready()
    async with timeout(30):
        message = (await queue.pull()).message
        await ending
    assert (list(message.token_calls), list(message.token_ids)) == ([1, 1], [7, 8])
    assert [(answer.call, answer.message, answer.HasField("status")) for answer in message.answers] == [
        (1, b"finished", False),
        (1, b"", True),
    ]


async def test_tokens_do_not_wait_for_a_call_that_does_not_end_after_its_own() -> None:
    queue = ResponseQueue()
    endless, other = (CallTokens(queue, call, Ids(call, is_last=call == 1), is_paused=False) for call in (1, 2))
    endless.mark_ready()
    other.mark_ready()
    async with timeout(30):
        message = (await queue.pull()).message
    assert list(message.token_calls) == [1, 2]
    assert not message.answers


async def test_a_source_that_tells_twice_is_pulled_once_for_a_message() -> None:
    queue = ResponseQueue()
    source = Counted()
    tokens = CallTokens(queue, 1, source, is_paused=False)
    for _ in range(3):
        tokens.mark_ready()
    async with timeout(30):
        assert list((await queue.pull()).message.token_ids) == [1]
        tokens.mark_ready()
        assert list((await queue.pull()).message.token_ids) == [2]


async def test_a_paused_call_is_not_pulled_until_it_is_resumed() -> None:
    queue = ResponseQueue()
    source = Counted()
    paused, other = CallTokens(queue, 1, source, is_paused=True), CallTokens(queue, 2, Counted(), is_paused=False)
    async with timeout(30):
        paused.mark_ready()
        other.mark_ready()
        assert list((await queue.pull()).message.token_calls) == [2]
        assert source.pulled == 0
        paused.pause(is_paused=False)
        assert list((await queue.pull()).message.token_calls) == [1]


async def test_a_call_that_has_ended_is_not_pulled_even_if_it_is_resumed() -> None:
    queue = ResponseQueue()
    source = Counted()
    ended, other = (CallTokens(queue, call, source, is_paused=False) for call in (1, 2))
    async with timeout(30):
        ended.mark_ready()
        ended.close()
        ended.pause(is_paused=False)
        other.mark_ready()
        assert list((await queue.pull()).message.token_calls) == [2]


async def test_a_source_that_fails_fails_its_own_call_alone() -> None:
    queue, source = ResponseQueue(), Failing()
    failing, other = CallTokens(queue, 1, source, is_paused=False), CallTokens(queue, 2, Counted(), is_paused=False)
    async with timeout(30):
        sending = asyncio.create_task(failing.send())
        await source.subscribed.wait()
        failing.mark_ready()
        other.mark_ready()
        assert list((await queue.pull()).message.token_calls) == [2]
        await asyncio.wait([sending])
    assert isinstance(sending.exception(), EngineFailed)


async def test_a_call_that_is_left_while_its_tokens_wait_is_forgotten() -> None:
    queue, source = ResponseQueue(), Counted()
    tokens = CallTokens(queue, 1, source, is_paused=False)
    sending = asyncio.create_task(tokens.send())
    async with timeout(30):
        await source.subscribed.wait()
        tokens.mark_ready()
        sending.cancel()
        await asyncio.wait([sending])
        other = CallTokens(queue, 2, Counted(), is_paused=False)
        other.mark_ready()
        assert list((await queue.pull()).message.token_calls) == [2]
    assert tokens.source is None
