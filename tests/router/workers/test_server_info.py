"""GetServerInfo says what the deployment really offers."""

import pytest
from support.clients.baton_command import Baton
from support.cluster.command_fixtures import baton, environment  # noqa: F401
from support.cluster.in_process import FAST_ROUTER, Bench, bench, simulated

from baton.calls import unary
from baton.connection.settings import MAX_RECEIVE_BYTES
from baton.inference.v1 import server_info_pb2
from baton.version import __version__
from router.config import AdmissionConfig, LimitsConfig, OpenAIConfig

CONFIGURED = FAST_ROUTER.model_copy(
    update={
        "limits": LimitsConfig(max_answers=3, max_embed_inputs=7, max_timeout_seconds=90),
        "admission": AdmissionConfig(max_waiting=5, max_running_per_worker=2),
        "openai": OpenAIConfig(listen="127.0.0.1:0", max_body_bytes=4096),
    }
)
WORKERS = (simulated("p1", "prefill"), simulated("d1", "decode"), simulated("e1", "embed", max_batch=9))


async def info_of(running: Bench) -> server_info_pb2.GetServerInfoResponse:
    return await unary(running.stub.GetServerInfo(server_info_pb2.GetServerInfoRequest(), timeout=60))


async def test_limits_are_those_of_the_configuration() -> None:
    async with bench(router=CONFIGURED) as running:
        info = await info_of(running)
        openai_address = running.openai_address
    assert (info.version, info.routing_policy, len(info.models)) == (__version__, "least_loaded", 0)
    limits = info.limits
    assert (limits.max_message_bytes, limits.max_openai_body_bytes) == (MAX_RECEIVE_BYTES, 4096)
    assert (limits.max_waiting_requests, limits.max_running_per_worker) == (5, 2)
    assert (limits.max_answers, limits.max_embed_inputs, limits.max_timeout.seconds) == (3, 7, 90)
    assert [(each.name, each.address) for each in info.facades] == [
        ("grpc", ""),
        ("kserve", ""),
        ("openai", openai_address),
        ("anthropic", openai_address),
    ]


@pytest.mark.feature("GetServerInfo", engine="simulated", facade="grpc")
async def test_a_model_has_the_roles_engines_and_features_of_its_workers() -> None:
    async with bench(*WORKERS) as running:
        [offer] = (await info_of(running)).models
    assert (offer.model.name, offer.model.embed_workers, offer.model.decode_workers) == ("demo", 1, 1)
    assert (list(offer.roles), list(offer.engines)) == (["decode", "embed", "prefill"], ["simulated"])
    assert (offer.block_tokens, offer.dtype) == (16, "uint8")
    assert {"prompt", "token_ids", "logprobs", "several answers", "embeddings"} <= set(offer.features)
    assert not {"guided decoding", "lora", "prompt logprobs", "media"} & set(offer.features)
    assert "tcp" in offer.transports
    assert offer.engine_settings["max_sequences"] == "256, 9"


async def test_baton_info_shows_it(baton: Baton) -> None:  # noqa: F811
    async with bench(*WORKERS, router=CONFIGURED) as running:
        shown = await baton("info", "--address", running.address)
        as_json = await baton("info", "--json", "--address", running.address)
    assert (shown.code, as_json.code) == (0, 0)
    assert "max_embed_inputs" in shown.out
    assert '"routing_policy": "least_loaded"' in as_json.out
