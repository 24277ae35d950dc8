"""EncodeService over the wire: inline and leased embeddings, their order, their release, and refused requests."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.clients.image_calls import (
    HIDDEN_SIZE,
    IMAGE_TOKENS,
    image,
    image_prompt,
    prefill_images,
    release_embedding,
    renew_embedding,
)
from support.clients.scraping import sample
from support.clients.worker_calls import decode_request
from support.clock import ManualClock
from support.cluster.workers import LEASE_SECONDS, Running, Starter
from support.eventually import eventually
from support.images.pictures import animation, many_scans, picture, vast_png

from baton.calls import unary
from baton.engine.v1 import encode_pb2, handoff_pb2, worker_pb2
from baton.errors import (
    BatonError,
    Draining,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    RoleMismatch,
    Unsupported,
)
from baton.inference.v1 import media_pb2, timing_pb2
from media.config import FetchConfig, MediaConfig
from rpc.channels import open_channel
from services.config import EncodeConfig

IMAGES = {"image_tokens": IMAGE_TOKENS, "image_hidden_size": HIDDEN_SIZE}
BLOCKS = -(-IMAGE_TOKENS // 16)


async def test_a_small_embedding_comes_inline(inline: Running) -> None:
    [embedding] = await inline.calls.encode(image())
    assert list(embedding.shape) == [IMAGE_TOKENS, HIDDEN_SIZE]
    assert embedding.dtype == "float32"
    assert len(embedding.inline) == IMAGE_TOKENS * HIDDEN_SIZE * 4


async def test_a_large_embedding_is_leased_and_not_inline(encode: Running) -> None:
    [embedding] = await encode.calls.encode(image())
    lease = embedding.lease
    assert embedding.WhichOneof("source") == "lease"
    assert len(lease.block_ids) == BLOCKS
    assert lease.num_bytes == IMAGE_TOKENS * HIDDEN_SIZE * 4
    assert lease.address == encode.worker.address
    assert lease.epoch == encode.worker.epoch
    assert 0 < lease.lease.ToMilliseconds() <= LEASE_SECONDS * 1000


async def test_several_images_are_answered_in_their_order(inline: Running) -> None:
    together = await inline.calls.encode(image(32), image(33), image(34))
    alone = [(await inline.calls.encode(image(width)))[0] for width in (32, 33, 34)]
    assert [one.digest for one in together] == [one.digest for one in alone]
    assert len({one.digest for one in together}) == 3


async def test_the_timing_of_the_encode_stage_is_told(encode: Running) -> None:
    answer = await unary(encode.calls.encodes.Encode(encode_pb2.EncodeRequest(request_id="t", media=[image()])))
    assert [(one.stage, one.worker_id) for one in answer.timings] == [
        (timing_pb2.STAGE_ENCODE, encode.worker.worker_id)
    ]


async def test_what_is_held_counts_in_load_and_list(encode: Running) -> None:
    await encode.calls.encode(image(32), image(33))
    assert encode.blocks_used == encode.blocks_held == 2 * BLOCKS
    listed = await unary(encode.calls.handoffs.List(handoff_pb2.ListRequest()))
    assert [(held.request_id, held.num_blocks) for held in listed.handoffs] == [("r", BLOCKS)] * 2


async def test_a_release_frees_the_blocks_and_says_so(encode: Running) -> None:
    [embedding] = await encode.calls.encode(image())
    released = await release_embedding(encode.calls, embedding)
    assert (released.still_valid, released.blocks_freed) == (True, BLOCKS)
    assert encode.blocks_used == 0


async def test_a_lease_that_is_not_renewed_expires(encode: Running) -> None:
    [embedding] = await encode.calls.encode(image())
    encode.let_a_lease_pass()
    await eventually(lambda: encode.blocks_used == 0)
    assert not await renew_embedding(encode.calls, embedding)


async def test_a_lease_that_is_renewed_outlives_its_length(start: Starter) -> None:
    clock = ManualClock()
    async with start("encode", encode=EncodeConfig(inline_bytes=0), clock=clock, **IMAGES) as encode:
        [embedding] = await encode.calls.encode(image())
        for _ in range(5):
            clock.advance(LEASE_SECONDS * 0.9)
            assert await renew_embedding(encode.calls, embedding)
        assert encode.blocks_held == BLOCKS
        clock.advance(LEASE_SECONDS)
        await eventually(lambda: encode.blocks_used == 0)


async def test_an_abort_frees_what_is_held_for_the_request(encode: Running) -> None:
    await encode.calls.encode(image())
    aborted = await encode.calls.abort("r")
    assert (aborted.found, aborted.blocks_freed) == (True, BLOCKS)
    assert encode.blocks_used == 0


async def test_a_full_pool_refuses_with_a_time_to_come_back_and_holds_nothing_of_the_request(start: Starter) -> None:
    room_for_one = EncodeConfig(inline_bytes=0, pool_bytes=(2 * BLOCKS - 1) * 16 * HIDDEN_SIZE * 4)
    async with start("encode", encode=room_for_one, **IMAGES) as encode:
        with pytest.raises(Overloaded) as refused:
            await encode.calls.encode(image(32), image(33))
        assert refused.value.retry_after_seconds > 0
        await eventually(lambda: encode.blocks_used == 0, LEASE_SECONDS / 2)
        await encode.calls.encode(image(32))


async def test_a_cancelled_encode_leaves_nothing_for_longer_than_a_lease(start: Starter) -> None:
    slow = EncodeConfig(inline_bytes=0)
    async with start("encode", encode=slow, encode_seconds=0.01, **IMAGES) as encode:
        for pauses in range(15):
            task = asyncio.create_task(encode.calls.encode(image(32), image(33), request_id=f"r{pauses}"))
            await asyncio.sleep(pauses * 0.003)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await eventually(
            lambda: encode.blocks_used == 0 and encode.worker.engines.load().running == 0, LEASE_SECONDS + 1
        )


async def test_a_drain_waits_for_embeddings_to_be_read_and_refuses_new_media(start: Starter) -> None:
    async with start("encode", encode=EncodeConfig(inline_bytes=0), drain_seconds=5, **IMAGES) as encode:
        [embedding] = await encode.calls.encode(image())
        stages = encode.calls.worker.Drain(worker_pb2.DrainRequest())
        first = await stages.read()
        assert (first.handoffs_held, first.drained) == (1, False)
        with pytest.raises(Draining):
            await encode.calls.encode(image(), request_id="new")
        await release_embedding(encode.calls, embedding)
        assert (await stages.read()).drained


async def test_a_worker_that_only_encodes_refuses_prompts(encode: Running) -> None:
    with pytest.raises(RoleMismatch):
        await encode.calls.prefill()
    with pytest.raises(RoleMismatch):
        await encode.calls.decode(decode_request())


async def test_a_worker_without_the_role_refuses_media(prefill: Running) -> None:
    with pytest.raises(RoleMismatch):
        await prefill.calls.encode(image())


async def test_another_model_is_refused(encode: Running) -> None:
    request = encode_pb2.EncodeRequest(request_id="m", model="other", media=[image()])
    with pytest.raises(ModelNotFound):
        await unary(encode.calls.encodes.Encode(request))


async def test_one_worker_can_have_every_role(start: Starter) -> None:
    async with start("encode", "prefill", "decode", encode=EncodeConfig(inline_bytes=0), **IMAGES) as all_in_one:
        [embedding] = await all_in_one.calls.encode(image())
        handoff = await prefill_images(all_in_one.calls, image_prompt(embedding), "p")
        assert handoff.num_tokens > IMAGE_TOKENS
        assert (await release_embedding(all_in_one.calls, embedding)).still_valid
        card = (await unary(all_in_one.calls.worker.GetModel(worker_pb2.GetModelRequest()))).card
        assert card.images.encoder_fingerprint
        assert card.layout.digest != card.images.embedding_layout_digest


async def test_cards_of_encoders_and_readers_agree_on_images(encode: Running, prefill: Running) -> None:
    cards = [
        (await unary(worker.calls.worker.GetModel(worker_pb2.GetModelRequest()))).card for worker in (encode, prefill)
    ]
    for card in cards:
        assert card.images.placeholder == "<image>"
        assert card.images.placeholder_token_id == 257
        assert card.images.tokens_per_image == IMAGE_TOKENS
        assert list(card.capabilities.modalities) == [media_pb2.MODALITY_IMAGE]
    assert cards[0].images.embedding_layout_digest == cards[1].images.embedding_layout_digest == cards[0].layout.digest
    assert cards[0].images.encoder_fingerprint
    assert not cards[1].images.encoder_fingerprint


async def test_the_record_says_that_the_model_takes_images(encode: Running) -> None:
    [record] = encode.registry.workers()
    assert record.roles == ("encode",)
    assert record.capabilities == ("images", "multiplex")


def item(data: bytes, mime_type: str = "") -> media_pb2.MediaItem:
    return media_pb2.MediaItem(data=data, mime_type=mime_type)


def uri(text: str) -> media_pb2.MediaItem:
    return media_pb2.MediaItem(uri=text)


def sound() -> media_pb2.MediaItem:
    return media_pb2.MediaItem(data=picture("PNG"), modality=media_pb2.MODALITY_AUDIO)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"/>'

# Each is made when it is needed, since some are large.
BAD: dict[str, tuple[Callable[[], media_pb2.MediaItem], type[BatonError], str]] = {
    "nothing": (lambda: item(b""), InvalidRequest, "media[1].data"),
    "no source": (lambda: media_pb2.MediaItem(mime_type="image/png"), InvalidRequest, "media[1].source"),
    "truncated png": (lambda: item(picture("PNG")[:-30], "image/png"), InvalidRequest, "media[1].data"),
    "header only": (lambda: item(picture("PNG")[:40]), InvalidRequest, "media[1].data"),
    "garbage in a png": (lambda: item(picture("PNG")[:60] + b"\xff" * 500), InvalidRequest, "media[1].data"),
    "truncated jpeg": (lambda: item(picture("JPEG")[:200]), InvalidRequest, "media[1].data"),
    "another type": (lambda: item(picture("PNG"), "image/jpeg"), InvalidRequest, "media[1].mime_type"),
    "too many pixels": (lambda: item(vast_png(20_000)), InvalidRequest, "media[1].data"),
    "too many bytes": (lambda: item(picture("PNG") + bytes(21 * 2**20)), InvalidRequest, "media[1].data"),
    "animated": (lambda: item(animation("GIF")), InvalidRequest, "media[1].data"),
    "laborious": (lambda: item(many_scans(200)), InvalidRequest, "media[1].data"),
    "zip": (lambda: item(b"PK\x03\x04" + bytes(100)), Unsupported, "media[1].data"),
    "svg": (lambda: item(SVG), Unsupported, "media[1].data"),
    "svg declared": (lambda: item(SVG, "image/svg+xml"), Unsupported, "media[1].mime_type"),
    "html": (lambda: item(b"<html><body>x</body></html>"), Unsupported, "media[1].data"),
    "pdf": (lambda: item(b"%PDF-1.7 " + bytes(100)), Unsupported, "media[1].data"),
    "text": (lambda: item(b"only some ordinary text here"), Unsupported, "media[1].data"),
    "noise": (lambda: item(bytes(range(256)) * 4), InvalidRequest, "media[1].data"),
    "audio": (sound, Unsupported, "media[1].modality"),
    "https": (lambda: uri("https://example.org/a.png"), Unsupported, "media[1].uri"),
    "http": (lambda: uri("http://169.254.169.254/latest"), Unsupported, "media[1].uri"),
    "file": (lambda: uri("file:///etc/passwd"), Unsupported, "media[1].uri"),
    "bad data uri": (lambda: uri("data:image/png;base64,@@@"), InvalidRequest, "media[1].uri"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_item_is_refused_by_its_field_and_the_worker_goes_on(encode: Running, name: str) -> None:
    bad, kind, field = BAD[name]
    with pytest.raises(kind) as refused:
        await encode.calls.encode(image(), bad())
    assert field in str(refused.value)
    assert refused.value.stage == "encode"
    assert encode.blocks_used == 0
    [embedding] = await encode.calls.encode(image())
    await release_embedding(encode.calls, embedding)


async def test_no_media_and_too_many_are_refused(encode: Running) -> None:
    for media in ((), [image()] * 17):
        with pytest.raises(InvalidRequest, match="media"):
            await encode.calls.encode(*media)


async def test_a_data_uri_is_read(inline: Running) -> None:
    address = "data:image/png;base64," + base64.b64encode(image().data).decode()
    [by_uri], [by_data] = await inline.calls.encode(uri(address)), await inline.calls.encode(image())
    assert by_uri.digest == by_data.digest


async def test_a_file_is_read_only_from_folders_that_are_allowed(start: Starter, tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    for folder in (allowed, other):
        folder.mkdir()
        (folder / "a.png").write_bytes(image().data)
    fetch = FetchConfig(allowed_folders=(str(allowed),))
    async with start("encode", media=MediaConfig(fetch=fetch), **IMAGES) as encode:
        [by_uri], [by_data] = (
            await encode.calls.encode(uri(f"file://{allowed}/a.png")),
            await encode.calls.encode(image()),
        )
        assert by_uri.digest == by_data.digest
        with pytest.raises(PermissionDenied):
            await encode.calls.encode(uri(f"file://{other}/a.png"))


async def test_health_and_reflection_know_the_service(encode: Running) -> None:
    async with open_channel(encode.worker.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await unary(health.Check(health_pb2.HealthCheckRequest(service="baton.engine.v1.EncodeService")))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
        listed = (await call.read()).list_services_response
        assert "baton.engine.v1.EncodeService" in [service.name for service in listed.service]


async def test_metrics_tell_of_the_embedding_pool(encode: Running) -> None:
    async with encode_supervised(encode):
        [embedding] = await encode.calls.encode(image())
        await eventually(lambda: sample("baton_embedding_blocks", state="used") == BLOCKS)
        await release_embedding(encode.calls, embedding)
        await eventually(lambda: sample("baton_embedding_blocks", state="used") == 0)
        assert (sample("baton_embedding_blocks", state="total") or 0) > BLOCKS


@asynccontextmanager
async def encode_supervised(running: Running) -> AsyncIterator[None]:
    task = asyncio.create_task(running.worker.watch_engines())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_fifty_bad_items_at_once_leave_the_worker_serving(encode: Running) -> None:
    bad = [BAD[name][0]() for name in BAD if name != "too many bytes"]
    attempts = [encode.calls.encode(bad[i % len(bad)], request_id=f"b{i}") for i in range(50)]
    ended = await asyncio.gather(*attempts, return_exceptions=True)
    assert all(isinstance(error, (InvalidRequest, Unsupported, PermissionDenied)) for error in ended)
    assert all(isinstance(error, BatonError) and error.worker_id == encode.worker.worker_id for error in ended)
    assert encode.worker.engines.healthy
    assert len(await encode.calls.encode(image())) == 1
