"""Compiling grammars never holds up the event loop, and never takes for ever."""

import asyncio
import threading

import pytest

from baton.errors import InvalidRequest, Overloaded
from grammars.tasks import GrammarThread


async def test_the_event_loop_goes_on_while_a_grammar_is_compiled() -> None:
    release = threading.Event()
    thread = GrammarThread()
    running = asyncio.create_task(thread.run(lambda: release.wait(20)))
    await asyncio.sleep(0)
    release.set()
    assert await running
    thread.close()


async def test_a_grammar_that_takes_too_long_is_refused_and_those_behind_it_are_told_to_retry() -> None:
    release = threading.Event()
    thread = GrammarThread(seconds=0.05)
    slow = asyncio.create_task(thread.run(lambda: release.wait(20)))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await thread.run(lambda: True)
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.05 s"):
        await slow
    release.set()
    thread.close()


async def test_the_queue_is_bounded() -> None:
    release = threading.Event()
    thread = GrammarThread(max_waiting=1)
    first = asyncio.create_task(thread.run(lambda: release.wait(20)))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="are waiting"):
        await thread.run(lambda: True)
    release.set()
    assert await first
    thread.close()
