"""Validation of media: refused requests with status and field, and accepted ones."""

from typing import Any

import grpc
import pytest
from support.cluster.in_process import FAST_ROUTER, Bench, bench, simulated
from support.images.pictures import picture
from support.images.simulated_workers import IMAGE_TOKENS, TEXT_TOKENS, about, multimodal
from test_bad_requests import refusal, wrong_fields

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc, media_pb2
from router.config import LimitsConfig
from rpc.channels import open_channel

INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
PNG = {"data": picture()}
BROKEN = {"data": picture()[:40]}


@pytest.fixture(scope="module")
def few_images() -> Any:
    return FAST_ROUTER.model_copy(update={"limits": LimitsConfig(max_images=3)})


def said(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A user's message of these parts."""
    return {"chat": {"messages": [{"role": "user", "parts": list(parts)}]}, **fields}


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("media", {"prompt": "<image>"}),
    ("media", {"prompt": "none", "media": [PNG]}),
    ("media", {"prompt": "<image> <image>", "media": [PNG]}),
    ("media", {"prompt": "<image>", "media": [PNG, PNG]}),
    ("media", {"token_ids": {"ids": [1, 257, 2]}}),
    ("media", {"token_ids": {"ids": [1, 257, 257, 2]}, "media": [PNG]}),
    ("media", {"prompt": "<image>" * 4, "media": [PNG] * 4}),
    ("media[0]", {"prompt": "<image>", "media": [{}]}),
    ("media[0].modality", {"prompt": "<image>", "media": [{**PNG, "modality": 77}]}),
    ("media[1].data", {"prompt": "<image><image>", "media": [PNG, BROKEN]}),
    ("media[0].uri", {"prompt": "<image>", "media": [{"uri": "data:image/png;base64,!"}]}),
    ("media[0].mime_type", {"prompt": "<image>", "media": [{**PNG, "mime_type": "image/gif"}]}),
    ("chat.messages[0].parts[1].media.data", said({"text": "x"}, {"media": BROKEN})),
    ("chat.messages[0].parts[0].media.uri", said({"media": {"uri": "nonsense"}})),
    ("chat.messages", said({"media": PNG}, {"text": "and <image>"})),
    ("chat.messages", said(*[{"media": PNG}] * 4)),
    ("media", said({"text": "x"}, media=[PNG])),
]


async def test_a_wrong_medium_is_named_by_its_field(few_images: Any) -> None:
    workers = [multimodal("e1", "encode"), multimodal("p1", "prefill"), multimodal("d1", "decode")]
    async with bench(*workers, router=few_images) as running:
        for field, request in WRONG:
            error = await refusal(running, **request)
            assert error.code() == INVALID, (field, error.details())
            assert wrong_fields(error) == [field]


async def test_what_the_model_cannot_see_is_not_supported() -> None:
    async with bench(multimodal("e1", "encode"), multimodal("d1", "prefill", "decode")) as running:
        sound = about(media=[{**PNG, "modality": media_pb2.MODALITY_AUDIO}])
        error = await refusal(running, **sound)
        assert error.code() == UNIMPLEMENTED
        assert error.details() == "media[0].modality: demo does not support audio; it supports image"
        svg = await refusal(running, **about(b"<svg xmlns='http://www.w3.org/2000/svg'/>"))
        assert svg.code() == UNIMPLEMENTED


async def test_a_model_that_does_not_see_refuses_media(pair: Bench) -> None:
    error = await refusal(pair, **about())
    assert error.code() == UNIMPLEMENTED
    assert "demo does not support media" in str(error.details())


async def test_a_prompt_that_images_make_too_long_is_refused_before_any_worker_is_called() -> None:
    config = {"max_context_tokens": TEXT_TOKENS + IMAGE_TOKENS}
    async with bench(multimodal("d1", "prefill", "decode", **config)) as running:
        error = await refusal(running, **about())
        assert error.code() == INVALID
        assert wrong_fields(error) == ["prompt"]
        assert f"has {TEXT_TOKENS + IMAGE_TOKENS} tokens" in str(error.details())


async def test_token_ids_with_a_placeholder_for_each_image_are_as_good_as_text() -> None:
    async with bench(multimodal("e1", "encode"), multimodal("d1", "prefill", "decode")) as running:
        ids = [token if token < 256 else 257 for token in [*b"look at ", 257, *b" and tell"]]
        by_ids = await running.generate(**{**about(), "prompt": "", "token_ids": {"ids": ids}})
        by_text = await running.generate(**about())
        assert by_ids.text == by_text.text
        assert by_ids.started.prompt_tokens == TEXT_TOKENS + IMAGE_TOKENS


async def test_images_in_a_conversation_stand_where_they_were_said() -> None:
    async with bench(multimodal("e1", "encode"), multimodal("d1", "prefill", "decode")) as running:
        options = {"sampling": {"temperature": 0.0}, "stopping": {"max_tokens": 8}}
        chat = await running.generate(**said({"text": "a "}, {"media": PNG}, {"text": " b"}), **options)
        prompt = await running.generate(**about(prompt="user: a <image> bassistant: "))
        assert chat.token_ids == prompt.token_ids
        assert chat.finished.usage.media_tokens == IMAGE_TOKENS


async def test_encoding_ends_with_the_requests_deadline() -> None:
    async with bench(multimodal("e1", "encode", encode_seconds=5.0), multimodal("d1", "prefill", "decode")) as running:
        async with open_channel(running.address) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(generate_pb2.GenerateRequest(**about()), timeout=0.5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [message async for message in call]
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_models_tell_what_they_can_see() -> None:
    async with bench(multimodal("e1", "encode"), multimodal("d1", "prefill", "decode")) as running:
        model = running.cluster.models[0]
        assert list(model.capabilities.modalities) == [media_pb2.MODALITY_IMAGE]
    async with bench(simulated("d1", "prefill", "decode")) as running:
        assert not running.cluster.models[0].capabilities.modalities
