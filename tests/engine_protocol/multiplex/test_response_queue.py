"""The messages of a stream of calls: the ends of calls go out with their last tokens, and delay others little."""

import asyncio
from collections.abc import Callable, Sequence

from grpc import StatusCode

from baton.engine.v1 import multiplex_pb2 as pb
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


class Ended:
    def record_sent(self) -> None:
        """Not looked at."""

    def record_lost(self) -> None:
        """Not looked at."""


async def finish(queue: ResponseQueue, tokens: CallTokens) -> None:
    """What a servicer does after its last token: waits for others, says how it was, and ends."""
    await tokens.done
    queue.add(tokens.call, b"finished")
    await asyncio.sleep(0)
    queue.end(tokens.call, pb.CallStatus(code=StatusCode.OK.value[0]), Ended())


async def test_the_last_tokens_of_a_call_its_last_answer_and_its_status_are_one_message() -> None:
    queue = ResponseQueue()
    tokens = CallTokens(1, Ids(7, 8, is_last=True), is_paused=False)
    ending = asyncio.create_task(finish(queue, tokens))
    queue.mark_ready(tokens)
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
    endless, other = (CallTokens(call, Ids(call, is_last=call == 1), is_paused=False) for call in (1, 2))
    queue.mark_ready(endless)
    queue.mark_ready(other)
    async with timeout(30):
        message = (await queue.pull()).message
    assert list(message.token_calls) == [1, 2]
    assert not message.answers
