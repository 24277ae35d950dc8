"""The synchronous client against a real router, from a thread beside the router's event loop."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
from support.clients.baton_command import SmallCluster
from support.eventually import eventually

from baton import Client
from baton.errors import Cancelled, ConfigError, DeadlineExceeded, InvalidRequest, RequestNotFound, Unavailable
from baton.inference.v1 import generate_pb2

Result = TypeVar("Result")


async def on(cluster: SmallCluster, use: Callable[[Client], Result]) -> Result:
    """The result of `use`, called in a thread with a client of the cluster."""

    def run() -> Result:
        with Client(cluster.address) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def test_an_answer_is_an_iterator_of_its_events(cluster: SmallCluster) -> None:
    events = await on(cluster, lambda client: list(client.generate("hello", max_tokens=3)))
    kinds = [event.WhichOneof("event") for event in events]
    # Tokens that wait for the reader come together.
    assert (kinds[0], {*kinds[1:-1]}, kinds[-1]) == ("started", {"token"}, "finished")
    assert events[-1].finished.usage.completion_tokens == 3


async def test_the_text_of_a_stream_is_that_of_the_unary_answer(cluster: SmallCluster) -> None:
    def both(client: Client) -> tuple[str, str]:
        whole = client.generate_unary("hello", max_tokens=4, seed=7)
        return client.generate("hello", max_tokens=4, seed=7).text(), whole.token.text

    streamed, whole = await on(cluster, both)
    assert streamed == whole != ""


async def test_a_generation_knows_its_request_and_its_trace(cluster: SmallCluster) -> None:
    def read(client: Client) -> tuple[str, str, str]:
        answer = client.generate("hello", max_tokens=1)
        answer.text()
        return answer.request_id, answer.trace_id, repr(answer)

    request_id, trace_id, shown = await on(cluster, read)
    assert request_id
    assert int(trace_id, 16)
    assert shown == f"<baton.Generation request_id={request_id!r} trace_id={trace_id!r}>"


async def test_leaving_the_loop_frees_the_blocks(cluster: SmallCluster) -> None:
    def leave(client: Client) -> None:
        with client.generate("hello") as events:
            for event in events:
                if event.HasField("token"):
                    break

    await on(cluster, leave)
    await eventually(lambda: not cluster.blocks_used)


async def test_an_answer_that_is_dropped_frees_the_blocks(cluster: SmallCluster) -> None:
    def drop(client: Client) -> None:
        next(client.generate("hello"))

    await on(cluster, drop)
    await eventually(lambda: not cluster.blocks_used)


async def test_a_cancel_from_another_thread_ends_the_answer_as_cancelled(cluster: SmallCluster) -> None:
    def read(client: Client) -> None:
        answer = client.generate("hello")
        next(answer)
        threading.Thread(target=answer.cancel).start()
        with pytest.raises(Cancelled):
            list(answer)

    await on(cluster, read)
    await eventually(lambda: not cluster.blocks_used)


async def test_cancel_by_id_returns_what_each_stage_confirmed(cluster: SmallCluster) -> None:
    def cancel(client: Client) -> set[str]:
        with client.generate(generate_pb2.GenerateRequest(request_id="one", prompt="hello")) as events:
            for event in events:
                if event.HasField("token"):
                    break
            return {receipt.worker_id for receipt in client.cancel("one")}

    assert "decode-0" in await on(cluster, cancel)


async def test_every_other_method_answers(cluster: SmallCluster) -> None:
    def ask(client: Client) -> tuple[list[int], str, list[str], str, set[str]]:
        ids = client.tokenize("hi")
        return (
            ids,
            client.detokenize(ids),
            [model.name for model in client.models()],
            client.model().name,
            {worker.worker_id for worker in client.workers()},
        )

    assert await on(cluster, ask) == ([104, 105], "hi", ["small"], "small", {"prefill-0", "decode-0"})


async def test_a_refusal_is_an_invalid_request_with_its_fields(cluster: SmallCluster) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await on(cluster, lambda client: client.generate("").text())
    assert [violation.field for violation in refused.value.violations] == ["prompt"]


async def test_cancelling_what_does_not_run_is_request_not_found(cluster: SmallCluster) -> None:
    with pytest.raises(RequestNotFound):
        await on(cluster, lambda client: client.cancel("never"))


async def test_a_timeout_ends_an_answer_with_deadline_exceeded(cluster: SmallCluster) -> None:
    with pytest.raises(DeadlineExceeded):
        await on(cluster, lambda client: client.generate("hello", timeout_seconds=0.05).text())


def test_a_router_that_is_not_there_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable):
        client.models()


def test_a_number_that_its_field_cannot_hold_is_an_invalid_request() -> None:
    with Client() as client, pytest.raises(InvalidRequest) as refused:
        client.generate("hello", max_tokens=-1)
    assert refused.value.violations[0].field == "stopping.max_tokens"


def test_options_beside_a_whole_request_are_a_mistake() -> None:
    with Client() as client, pytest.raises(ValueError, match="set them in the GenerateRequest"):
        client.generate(generate_pb2.GenerateRequest(prompt="hello"), max_tokens=3)


def test_a_token_does_not_leave_this_host_in_plain_text() -> None:
    with pytest.raises(ConfigError, match="over TLS only"):
        Client("router.example:7070", token="secret-0123456789abcdef")


def test_a_client_shows_neither_token_nor_files() -> None:
    with Client(token="secret-0123456789abcdef", tenant="shop") as client:
        assert repr(client) == "<baton.Client '127.0.0.1:7070' tenant='shop'>"
