"""The options of clients, through a router and two workers on vLLM: the same as on one."""

import json
import re

import grpc
import pytest
from grpc import aio
from support.cluster.in_process import Bench, Stream
from support.engines import vllm
from support.engines.engine_calls import collect
from support.eventually import eventually

from baton.inference.v1 import generate_pb2
from grammars.guide import Guide, GuideKind
from services.engines.prompt import Prompt, Sampling

pytestmark = [pytest.mark.requires_vllm, pytest.mark.usefixtures("end_of_vllm")]

IDS = [(index * index + 11) % 250 + 5 for index in range(70)]
WHOLE = {"routing": {"topology": "TOPOLOGY_AGGREGATED"}}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Mia", "Tom"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GUIDES = {
    "choice": {"choice": {"texts": ["a red fox", "a blue bird"]}},
    "regex": {"regex": "[0-9]{3}-[0-9]{4}"},
    "schema": {"json_schema": json.dumps(SCHEMA)},
    "grammar": {"grammar": 'start: "to be" (" or not"){2,3}'},
}


def _asked(max_tokens: int = 8, **fields: object) -> dict[str, object]:
    stopping = {"max_tokens": max_tokens, "ignore_eos": "guided" not in fields}
    return {"token_ids": {"ids": IDS}, "sampling": {"temperature": 0.8, "seed": 3}, "stopping": stopping, **fields}


def _reports(stream: Stream) -> list[generate_pb2.PromptLogprobs]:
    return [one.token.prompt_logprobs for one in stream.messages if one.token.HasField("prompt_logprobs")]


@pytest.mark.feature("log probabilities of prompts", engine="vllm", facade="grpc")
@pytest.mark.feature("logprobs", engine="vllm", facade="grpc")
async def test_log_probabilities_are_the_same_on_one_worker_and_on_two(pair: Bench) -> None:
    response = {"logprobs": 2, "prompt_logprobs": 1}
    apart = await pair.generate(**_asked(response=response))
    whole = await pair.generate(**_asked(response=response), **WHOLE)
    assert (apart.placed, whole.placed) == (("p1", "d1"), ("", "d1"))
    [ours], [theirs] = _reports(apart), _reports(whole)
    assert (len(ours.logprobs), len(ours.top_token_ids), ours.top) == (len(IDS) - 1, len(IDS) - 1, 1)
    assert all(top >= own for own, top in zip(ours.logprobs, ours.top_logprobs, strict=True))
    assert list(ours.logprobs) == pytest.approx(list(theirs.logprobs), abs=1e-4)
    told = [[each for message in one.messages for each in message.token.logprobs] for one in (apart, whole)]
    assert [each.token_id for each in told[0]] == apart.token_ids == whole.token_ids
    assert [each.logprob for each in told[0]] == pytest.approx([each.logprob for each in told[1]], abs=1e-4)
    assert all(len(each.top) == 2 for each in told[0])


@pytest.mark.feature("guided decoding", engine="vllm", facade="grpc")
@pytest.mark.parametrize("kind", GUIDES)
async def test_guided_answers_follow_their_grammar_on_one_worker_and_on_two(kind: str, pair: Bench) -> None:
    guided = GUIDES[kind]
    apart = await pair.generate(**_asked(60, guided=guided))
    whole = await pair.generate(**_asked(60, guided=guided), **WHOLE)
    assert (apart.placed, apart.token_ids) == (("p1", "d1"), whole.token_ids)
    match kind:
        case "choice":
            assert apart.text in ("a red fox", "a blue bird")
        case "regex":
            assert re.fullmatch("[0-9]{3}-[0-9]{4}", apart.text)
        case "schema":
            assert json.loads(apart.text).keys() == {"name", "age"}
        case _:
            assert re.fullmatch("to be( or not){2,3}", apart.text)
    await eventually(lambda: pair.used_blocks() == 0)


async def test_options_that_vllm_would_break_a_grammar_with_are_refused(pair: Bench) -> None:
    asked = _asked(20, guided=GUIDES["choice"])
    for options in ({"ignore_eos": True}, {"min_tokens": 3}):
        with pytest.raises(aio.AioRpcError, match="ignore_eos or min_tokens") as refused:
            await pair.generate(**{**asked, "stopping": {"max_tokens": 20, **options}})
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_guided_answer_is_continued_inside_its_grammar() -> None:
    sampling = Sampling(max_tokens=40, temperature=0.0, guide=Guide(GuideKind.REGEX, "[a-c]{12}-[x-z]{6}"))
    with vllm.installed():
        async with vllm.SHARED.lend() as engine:
            whole = (await collect(engine.decode(Prompt(tuple(IDS)), sampling))).ids
            rest = (await collect(engine.decode(Prompt(tuple(IDS), emitted=whole[:5]), sampling))).ids
    assert rest == whole[5:]
