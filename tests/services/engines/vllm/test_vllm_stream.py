"""An answer of vLLM that is read by steps instead of by a task; without vLLM."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from support.eventually import eventually

from baton.errors import EngineFailed, HandoffLost
from services.engines.answer import Finished, FinishReason, Tokens
from services.engines.external.requests import RunningStream
from services.engines.vllm.requests.generation import KnownTokensDiffer, VllmGeneration, VllmRequest
from services.engines.vllm.requests.sampling import Plan

END = Finished(FinishReason.LENGTH, 3)


def _output(ids: list[int], reason: str | None = None) -> Any:
    completion = SimpleNamespace(token_ids=ids, logprobs=None, finish_reason=reason)
    return SimpleNamespace(
        outputs=[completion], prompt_logprobs=None, kv_transfer_params=None, num_cached_tokens=0, metrics=None
    )


class Answer:
    """A generation whose outputs the test gives, behind two tokens that the client has."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.dropped = 0
        self.calls = 0
        self.generation = VllmGeneration(VllmRequest(Plan((1, 2, 3), (7, 8)), {}), 60.0)
        task = self.generation.start(self._outputs(), lambda: None)
        task.add_done_callback(lambda _: self.generation.end())
        self.stream = RunningStream(self._events(), self._drop, self.generation, lambda: END)

    def ready(self) -> None:
        self.calls += 1

    async def _outputs(self) -> AsyncGenerator[Any, None]:
        while (output := await self.outputs.get()) is not None:
            yield output

    async def _events(self) -> AsyncGenerator[Tokens | Finished, None]:
        yield END

    async def _drop(self) -> None:
        self.dropped += 1


async def test_a_subscriber_gets_the_tokens_behind_the_known_ones_and_the_end() -> None:
    answer = Answer()
    answer.outputs.put_nowait(_output([7, 8, 9]))
    await eventually(lambda: len(answer.generation.ids) == 3)
    await answer.stream.subscribe(answer.ready)
    assert answer.calls == 1
    assert answer.stream.pull() == ((9,), None)
    answer.outputs.put_nowait(_output([10], "length"))
    answer.outputs.put_nowait(None)
    await eventually(lambda: answer.generation.has_ended)
    assert answer.calls > 1
    assert answer.stream.pull() == ((10,), END)


async def test_what_ended_the_generation_is_raised() -> None:
    answer = Answer()
    await answer.stream.subscribe(answer.ready)
    answer.generation.end(EngineFailed("gone"))
    with pytest.raises(EngineFailed, match="gone"):
        answer.stream.pull()
    answer.generation.stop()


@pytest.mark.parametrize("recomputable", [True, False], ids=["embeddings", "no embeddings"])
async def test_a_preempted_request_is_lost_if_it_has_no_embeddings(recomputable: bool) -> None:
    """vLLM computes its prompt again, and zeros stand in it for the images."""
    generation = VllmGeneration(VllmRequest(Plan((1, 2)), {}, recomputable=recomputable), 60.0)
    stamps = SimpleNamespace(num_preemptions=0)

    async def outputs() -> AsyncGenerator[Any, None]:
        for token, preemptions in ((7, 0), (8, 1)):
            stamps.num_preemptions = preemptions
            output = _output([token])
            output.metrics = stamps
            yield output

    task = generation.start(outputs(), lambda: None)
    if recomputable:
        await task
    else:
        with pytest.raises(HandoffLost, match="preempted"):
            await task
    assert generation.pull() == Tokens((7, 8) if recomputable else (7,))


async def test_other_tokens_than_the_known_ones_are_never_seen() -> None:
    """A reader that the first output woke runs before the error is known."""
    generation = VllmGeneration(VllmRequest(Plan((1, 2), (7, 8)), {}), 60.0)

    async def outputs() -> AsyncGenerator[Any, None]:
        yield _output([7])
        yield _output([9, 10])

    task = generation.start(outputs(), lambda: None)
    with pytest.raises(KnownTokensDiffer):
        await task
    assert (generation.has_known_tokens, generation.ids) == (False, [7])


async def test_a_closed_stream_aborts_the_request_and_tells_no_more() -> None:
    answer = Answer()
    await answer.stream.subscribe(answer.ready)
    await answer.stream.aclose()
    before = answer.calls
    answer.outputs.put_nowait(_output([7, 8, 9]))
    await eventually(lambda: len(answer.generation.ids) == 3)
    assert (answer.dropped, answer.calls) == (1, before)
    answer.generation.stop()
