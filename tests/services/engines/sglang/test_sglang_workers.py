"""A prefill and a decode worker on SGLang behind a router, over gRPC."""

import asyncio

import pytest
from support.cluster.in_process import Bench
from support.engines import sglang
from support.eventually import eventually

pytestmark = [pytest.mark.requires_sglang, pytest.mark.usefixtures("end_of_sglang"), pytest.mark.timeout(600)]

SAMPLING = {"temperature": 0.8, "seed": 7} if sglang.ON_GPU else {"temperature": 0.0}


def _ask(max_tokens: int, first: int = 10, **fields: object) -> dict[str, object]:
    stopping = {"max_tokens": max_tokens, "ignore_eos": True}
    ids = {"ids": [(first * 7 + index * index) % 300 + 5 for index in range(60)]}
    routing = {"topology": "TOPOLOGY_DISAGGREGATED"}
    return {"token_ids": ids, "sampling": SAMPLING, "stopping": stopping, "routing": routing, **fields}


async def _expected(running: Bench, first: int = 10) -> list[int]:
    return (await running.generate(**_ask(12, first, routing={"topology": "TOPOLOGY_AGGREGATED"}))).token_ids


@pytest.mark.feature("prefill and decode on different workers", engine="sglang", facade="grpc")
@pytest.mark.feature("streaming", engine="sglang", facade="grpc")
@pytest.mark.feature("token ids as the prompt", engine="sglang", facade="grpc")
async def test_an_answer_over_two_workers_is_that_of_one(pair: Bench) -> None:
    apart = await pair.generate(**_ask(12))
    assert apart.placed == ("p1", "d1")
    assert apart.token_ids == await _expected(pair)
    await eventually(lambda: pair.used_blocks() == 0)


@pytest.mark.feature("cancellation", engine="sglang", facade="grpc")
async def test_requests_that_clients_leave_harm_no_other(pair: Bench) -> None:
    whole = [await _expected(pair, number) for number in range(4)]

    async def leaving(number: int) -> None:
        task = asyncio.create_task(pair.generate(**_ask(60, number)))
        await asyncio.wait([task], timeout=0.02 * (number % 9))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def staying(number: int) -> bool:
        return (await pair.generate(**_ask(12, number % 4))).token_ids == whole[number % 4]

    for start in range(0, 24, 6):
        jobs = [staying(number) if number % 2 else leaving(number) for number in range(start, start + 6)]
        assert False not in await asyncio.gather(*jobs)
    await eventually(lambda: pair.used_blocks() == 0)
