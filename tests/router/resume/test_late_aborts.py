"""A router that has lost an answer's client stops its own calls, however late, and none of the next router's."""

import asyncio

import pytest
from support.clients.resuming import Received
from support.cluster.router_pair import Pair, kept_request, read, router_pair
from support.eventually import eventually

from baton.calls import unary
from baton.errors import Cancelled
from baton.inference.v1 import generate_pb2, timing_pb2
from services.control import Aborted, Aborter

_DISAGGREGATED = {"topology": generate_pb2.TOPOLOGY_DISAGGREGATED}
_THREE = {"seed": 5, "temperature": 0.8, "n": 3}
_PAIR = ("prefill", "decode")
_COMBINED = ("prefill+decode", "prefill+decode")


class _LateAborts:
    """Holds back what routers ask workers to abort."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.found: list[bool] = []
        self.may_come = asyncio.Event()
        abort = Aborter.abort

        async def abort_late(aborter: Aborter, request_id: str) -> Aborted:
            self.asked.append(request_id)
            await self.may_come.wait()
            aborted = await abort(aborter, request_id)
            self.found.append(aborted.found)
            return aborted

        monkeypatch.setattr(Aborter, "abort", abort_late)


def _are_computing(pair: Pair) -> bool:
    return any(worker.engines.load().waiting_prefill_tokens for worker in pair.running.workers.values())


@pytest.mark.parametrize("roles", [_PAIR, _COMBINED], ids="_".join)
async def test_a_late_abort_stops_no_answer_that_the_next_router_computes(
    roles: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = kept_request(sampling=_THREE, routing=_DISAGGREGATED)
    async with router_pair(*roles, prefill_base_seconds=0.3, decode_step_seconds=0.01) as pair:
        expected = await read(pair.first.Generate(request), Received(request))
        late = _LateAborts(monkeypatch)
        # The prompts of the second and the third answer are being computed.
        received = await read(pair.first.Generate(request), Received(request), until=2)
        await eventually(lambda: len(late.asked) == 2)
        resuming = asyncio.create_task(read(pair.second.ResumeGeneration(received.resume()), received))
        await eventually(lambda: bool(received.resumed) and _are_computing(pair))
        late.may_come.set()
        await resuming
        assert late.found == [False, False]
        assert received.whole == expected.whole
        await eventually(lambda: pair.running.used_blocks() == 0)


@pytest.mark.parametrize("tokens", [1, 60])
async def test_a_cancel_by_request_id_ends_kept_answers_while_prompts_are_computed_and_later(tokens: int) -> None:
    request = kept_request(sampling=_THREE, routing=_DISAGGREGATED, request_id="mine", stopping={"max_tokens": 2000})
    cancel = generate_pb2.CancelGenerationRequest(request_id="mine")
    async with router_pair(*_PAIR, prefill_base_seconds=0.3, decode_step_seconds=0.01) as pair:
        received = Received(request)
        reading = asyncio.create_task(read(pair.first.Generate(request), received))
        await eventually(lambda: received.tokens >= tokens and (tokens > 1 or _are_computing(pair)))
        answer = await unary(pair.first.CancelGeneration(cancel))
        with pytest.raises(Cancelled):
            await reading
        stages = [receipt.stage for receipt in answer.receipts]
        prompts = timing_pb2.STAGE_PREFILL_COMPUTE if tokens == 1 else timing_pb2.STAGE_DECODE
        assert stages.count(prompts) >= 2
        assert pair.running.used_blocks() == 0
