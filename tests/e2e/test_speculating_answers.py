"""Speculative decoding through a real cluster: the same answers, with the counts in the usage."""

import pytest
from support.clients.openai_api import client_of, openai_bench
from support.cluster.demo import demo_worker
from support.cluster.in_process import PATIENT, Stream, bench

from baton.inference.v1 import generate_pb2, sampling_pb2
from services.config import WorkerConfig

TEXT = "red circle, blue square, red circle, blue square, red circle, blue"


def worker(role: str, *, speculates: bool) -> WorkerConfig:
    config = demo_worker(role)
    if not speculates:
        return config
    speculation = {"kind": "prompt_lookup", "ngram": 1}
    engine = config.engine.model_validate({**config.engine.model_dump(), "speculation": speculation})
    return config.model_copy(update={"engine": engine})


async def answers(*, speculates: bool) -> list[Stream]:
    """Greedy, sampled, and ended by a stop string, each prefilled on one worker and decoded on another."""
    greedy = sampling_pb2.SamplingParams(temperature=0)
    sampled = sampling_pb2.SamplingParams(temperature=0.7, seed=11)
    whole = sampling_pb2.StoppingOptions(max_tokens=32, ignore_eos=True)
    stopping = sampling_pb2.StoppingOptions(max_tokens=32, ignore_eos=True, stop=["e"])
    routing = generate_pb2.RoutingOptions(topology=generate_pb2.TOPOLOGY_DISAGGREGATED)
    async with bench(
        worker("prefill", speculates=speculates), worker("decode", speculates=speculates), router=PATIENT
    ) as running:
        return [
            await running.generate(prompt=TEXT, sampling=sampling, stopping=stop, routing=routing)
            for sampling, stop in ((greedy, whole), (sampled, whole), (greedy, stopping))
        ]


@pytest.mark.feature("speculative decoding", engine="pytorch", facade="grpc")
async def test_answers_are_the_same_and_say_how_many_tokens_were_guessed() -> None:
    plain, speculating = await answers(speculates=False), await answers(speculates=True)
    assert [one.text for one in speculating] == [one.text for one in plain]
    assert [one.token_ids for one in speculating] == [one.token_ids for one in plain]
    assert [one.finished.reason for one in speculating] == [one.finished.reason for one in plain]
    usage = speculating[0].finished.usage
    assert 0 < usage.accepted_tokens <= usage.drafted_tokens
    assert plain[0].finished.usage.drafted_tokens == 0


@pytest.mark.feature("speculative decoding", engine="pytorch", facade="openai")
async def test_openais_usage_counts_what_was_guessed() -> None:
    async with openai_bench(worker("prefill", speculates=True), worker("decode", speculates=True)) as running:
        more = {"ignore_eos": True}
        answer = await client_of(running).completions.create(
            model="demo", prompt=TEXT, max_tokens=32, temperature=0, extra_body=more
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens
