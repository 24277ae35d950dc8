"""An answer whose worker is well, and whose connection to the router was lost: it goes on where it runs."""

import asyncio

import pytest
from support.clients.resuming import Received
from support.cluster.in_process import PATIENT, Bench, bench, simulated
from support.cluster.router_pair import kept_request, read
from support.eventually import PATIENCE_SECONDS, eventually

from baton.errors import BatonError
from router.config import RetryConfig
from router.telemetry import metrics

_WAITING = PATIENT.model_copy(update={"retry": RetryConfig(wait_seconds=PATIENCE_SECONDS)})
_IMPATIENT = PATIENT.model_copy(update={"retry": RetryConfig(wait_seconds=1)})


def _attached() -> float:
    value: float = metrics.REATTACHMENTS.labels("attached")._value.get()
    return value


async def _lose_connection(running: Bench, received: Received, tokens: int) -> None:
    await eventually(lambda: received.tokens >= tokens)
    await running.proxies["decode"].cut()
    await running.proxies["decode"].restore()


@pytest.mark.parametrize("fields", [{}, {"response": {"logprobs": 2}}, {"stopping": {"stop": ["ab", "zz"]}}])
async def test_a_kept_answer_goes_on_at_its_only_worker_after_its_connection_is_lost(fields: dict[str, object]) -> None:
    fields = {"stopping": {"max_tokens": 400, **dict(fields.pop("stopping", {}))}, **fields}  # type: ignore[call-overload]
    request = kept_request(**fields)
    configs = simulated("prefill", "prefill"), simulated("decode", "decode", decode_step_seconds=0.005)
    async with bench(*configs, router=_WAITING) as running:
        expected = await read(running.stub.Generate(request, timeout=PATIENCE_SECONDS), Received(request))
        before, received = _attached(), Received(request)
        losing = asyncio.create_task(_lose_connection(running, received, min(20, expected.tokens // 2)))
        await read(running.stub.Generate(request, timeout=PATIENCE_SECONDS), received)
        await losing
        assert received.whole == expected.whole
        assert received.finished is not None
        assert received.finished.migrations == 0
        assert _attached() == before + 1
        await eventually(lambda: running.used_blocks() == 0)


async def test_an_answer_whose_only_worker_has_forgotten_it_fails_as_without_the_attempt() -> None:
    request = kept_request(stopping={"max_tokens": 400}, routing={"topology": "TOPOLOGY_DISAGGREGATED"})
    configs = simulated("prefill", "prefill"), simulated("decode", "decode", decode_step_seconds=0.005)
    async with bench(*configs, router=_IMPATIENT) as running:
        received, before = Received(request), _attached()

        async def lose() -> None:
            await eventually(lambda: received.tokens >= 20)
            await running.proxies["decode"].cut()
            running.workers["decode"].kept.forget_all()
            await running.proxies["decode"].restore()

        losing = asyncio.create_task(lose())
        with pytest.raises(BatonError):
            await read(running.stub.Generate(request, timeout=PATIENCE_SECONDS), received)
        await losing
        assert _attached() == before
        await eventually(lambda: running.used_blocks() == 0)
