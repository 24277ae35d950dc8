"""Records that do not say what their worker is: clients get their answers from the workers beside it."""

from typing import Any

import pytest
from grpc import aio
from support.cluster.in_process import DECODE, FAST_ROUTER, PREFILL, bench, simulated
from support.servers.tampering import tampered

from baton.error_details import from_rpc_error
from router.config import RoutingConfig

RANDOM = FAST_ROUTER.model_copy(update={"routing": RoutingConfig(policy="random")})
REQUEST: dict[str, Any] = {"prompt": "hello" * 100, "stopping": {"max_tokens": 3}}
LIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ranks": ({}, {"data_parallel_ranks": 512}),
    "context": ({"max_context_tokens": 256}, {"max_context_tokens": 4096}),
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("lie", LIES)
async def test_a_request_that_a_worker_refuses_for_its_wrong_record_goes_to_another_one(lie: str, role: str) -> None:
    engine, record = LIES[lie]
    liar = simulated("liar", role, **engine)
    method = role.capitalize()
    async with (
        bench(PREFILL, DECODE, router=RANDOM) as running,
        tampered(running, liar, multiplexed=True, **record) as tampering,
    ):
        for _ in range(60):
            assert len((await running.generate(**REQUEST)).token_ids) == 3
            if tampering.calls[method]:
                break
        assert tampering.calls[method]


async def test_alone_its_refusal_is_not_said_to_be_the_clients_fault() -> None:
    async with (
        bench(PREFILL, router=RANDOM) as running,
        tampered(running, simulated("liar", "decode"), multiplexed=True, data_parallel_ranks=512),
    ):
        for _ in range(20):
            try:
                await running.generate(**REQUEST)
            except aio.AioRpcError as refused:
                error = from_rpc_error(refused)
                assert (error.reason, error.worker_id) == ("INVALID_REPLY", "liar")
                return
        raise AssertionError("every rank was the only one")
