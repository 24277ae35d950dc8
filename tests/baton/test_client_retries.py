"""The clients' retries."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from support.servers.scripted_router import scripted

from baton import AsyncClient, Client, Retry
from baton.errors import BatonError, InvalidRequest, NoWorker, Overloaded, Unavailable
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import model_pb2

QUICK = Retry(attempts=3, initial_seconds=0.001)


class Script:
    """A server whose calls fail with these errors, one after the other, and then succeed."""

    def __init__(self, *errors: BatonError) -> None:
        self.calls = 0
        self._errors = list(errors)

    def _next(self) -> None:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)

    async def models(self, request: object, context: object) -> model_pb2.ListModelsResponse:
        self._next()
        return model_pb2.ListModelsResponse(models=[model_pb2.Model(name="m")])

    async def generate(self, request: object, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self._next()
        yield pb.GenerateResponse(request_id="r", started=pb.Started())

    async def generate_and_fail(self, request: object, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.calls += 1
        yield pb.GenerateResponse(request_id="r", started=pb.Started())
        raise Unavailable("gone")


def synchronous(address: str, retry: Retry | None, use: Callable[[Client], Any]) -> Any:
    with Client(address, retry=retry) as client:
        return use(client)


async def test_an_error_that_may_pass_is_tried_again() -> None:
    script = Script(Unavailable("gone"), NoWorker("none"))
    async with (
        scripted(ListModels=script.models) as server,
        AsyncClient(server.server.address, retry=QUICK) as client,
    ):
        assert [model.name for model in await client.models()] == ["m"]
    assert script.calls == 3


async def test_the_synchronous_client_does_the_same() -> None:
    script = Script(Unavailable("gone"), NoWorker("none"))
    async with scripted(ListModels=script.models) as server:
        models = await asyncio.to_thread(synchronous, server.server.address, QUICK, lambda client: client.models())
    assert ([model.name for model in models], script.calls) == (["m"], 3)


async def test_without_a_retry_the_first_error_is_raised() -> None:
    script = Script(Unavailable("gone"))
    async with scripted(ListModels=script.models) as server, AsyncClient(server.server.address) as client:
        with pytest.raises(Unavailable):
            await client.models()
    assert script.calls == 1


async def test_a_wrong_request_is_not_tried_again() -> None:
    script = Script(InvalidRequest.of("model", "is wrong"))
    async with (
        scripted(ListModels=script.models) as server,
        AsyncClient(server.server.address, retry=QUICK) as client,
    ):
        with pytest.raises(InvalidRequest):
            await client.models()
    assert script.calls == 1


async def test_a_stream_is_requested_again_before_its_first_event() -> None:
    script = Script(Unavailable("gone"))
    async with scripted(Generate=script.generate) as server:
        async with AsyncClient(server.server.address, retry=QUICK) as client:
            events = [event async for event in client.generate("hello")]
        answer = await asyncio.to_thread(
            synchronous, server.server.address, QUICK, lambda client: list(client.generate("hello"))
        )
    assert ([event.request_id for event in events], len(answer), script.calls) == (["r"], 1, 3)


async def test_a_stream_that_has_begun_is_not_requested_again() -> None:
    script = Script()
    async with scripted(Generate=script.generate_and_fail) as server:
        async with AsyncClient(server.server.address, retry=QUICK) as client:
            with pytest.raises(Unavailable):
                [event async for event in client.generate("hello")]
        with pytest.raises(Unavailable):
            await asyncio.to_thread(
                synchronous, server.server.address, QUICK, lambda client: list(client.generate("hello"))
            )
    assert script.calls == 2


async def test_a_pause_that_does_not_fit_the_timeout_is_not_waited_for() -> None:
    script = Script(Overloaded("full", retry_after_seconds=60))
    async with (
        scripted(ListModels=script.models) as server,
        AsyncClient(server.server.address, retry=QUICK) as client,
    ):
        with pytest.raises(Overloaded):
            await client.models(timeout_seconds=5)
    assert script.calls == 1


def test_the_pause_is_what_the_server_asks_for_else_it_doubles() -> None:
    retry = Retry(attempts=10, initial_seconds=0.1, max_seconds=1)
    asked = retry.pause_after(Overloaded("full", retry_after_seconds=2), 1)
    pauses = [retry.pause_after(Unavailable("gone"), attempt) for attempt in (1, 2, 3, 9)]
    assert asked is not None
    assert 2 <= asked <= 2.5
    assert all(
        pause is not None and least <= pause <= least * 1.25
        for pause, least in zip(pauses, (0.1, 0.2, 0.4, 1), strict=True)
    )
    assert retry.pause_after(Unavailable("gone"), 10) is None


def test_a_retry_of_no_attempts_is_refused() -> None:
    with pytest.raises(ValueError, match="attempts must be at least 1"):
        Retry(attempts=0)
