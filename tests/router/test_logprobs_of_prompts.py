"""`response.prompt_logprobs` through a router: with the first token, on one worker or two, and after a failure."""

from typing import Any

import grpc
import pytest
from grpc import aio
from support.cluster.demo import demo_worker
from support.cluster.in_process import PATIENT, Bench, Stream, bench, simulated

from baton.inference.v1 import generate_pb2

PROMPT = list(range(100, 140))


async def asked(running: Bench, **response: Any) -> Stream:
    fields: dict[str, Any] = {"token_ids": {"ids": PROMPT}, "stopping": {"max_tokens": 4}}
    return await running.generate(**fields, response={"prompt_logprobs": 1, **response}, sampling={"temperature": 0.0})


def reports(stream: Stream) -> list[generate_pb2.PromptLogprobs]:
    return [one.token.prompt_logprobs for one in stream.messages if one.token.HasField("prompt_logprobs")]


@pytest.mark.feature("log probabilities of prompts", engine="pytorch", facade="grpc")
@pytest.mark.feature("several answers", engine="pytorch", facade="grpc")
@pytest.mark.feature("token ids as the prompt", engine="pytorch", facade="grpc")
@pytest.mark.feature("whole answers", engine="pytorch", facade="grpc")
async def test_they_come_once_with_the_first_token_on_one_worker_and_on_two() -> None:
    async with bench(demo_worker("prefill"), demo_worker("decode"), router=PATIENT) as running:
        apart = await asked(running)
        request = generate_pb2.GenerateRequest(token_ids={"ids": PROMPT}, stopping={"max_tokens": 4})
        request.sampling.temperature = 0.0
        request.response.prompt_logprobs = 1
        request.routing.topology = generate_pb2.TOPOLOGY_AGGREGATED
        whole = await running.stub.GenerateUnary(generate_pb2.GenerateUnaryRequest(request=request), timeout=60)
        request.sampling.n = 2
        several = [one async for one in running.stub.Generate(request, timeout=60)]
    [report] = reports(apart)
    assert apart.messages[1].token.HasField("prompt_logprobs")
    assert apart.placed == ("prefill-0", "decode-0")
    assert (len(report.logprobs), report.top) == (len(PROMPT) - 1, 1)
    assert len(report.top_token_ids) == len(report.top_logprobs) == len(PROMPT) - 1
    assert all(top >= own for own, top in zip(report.logprobs, report.top_logprobs, strict=True))
    assert list(whole.token.prompt_logprobs.logprobs) == pytest.approx(list(report.logprobs), abs=1e-4)
    assert list(whole.token.token_ids) == apart.token_ids
    assert len(reports(Stream(several))) == 1


async def test_wrong_numbers_are_named_and_other_engines_refuse() -> None:
    async with bench(demo_worker("decode"), router=PATIENT) as running:
        with pytest.raises(aio.AioRpcError) as caught:
            await asked(running, prompt_logprobs=21)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    async with bench(simulated("d1", "decode")) as running:
        with pytest.raises(aio.AioRpcError, match="prompt logprobs") as refused:
            await asked(running)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
