"""Answers about images equal the plain model's: encode, prefill and decode in separate processes."""

import struct
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO

import grpc
import pytest
import pytest_asyncio
from PIL import Image
from support.clients.generation import generate, generate_all
from support.cluster.fleet import PATIENT, Fleet, FleetPlan, overrides, shared_fleet
from support.engines.checkpoints import DEMO, PlainModel
from support.images.demo_questions import MAX_TOKENS, Question, as_chat, as_prompt, chat, questions
from support.images.pictures import animation, chunk, many_scans, picture, vast_png
from support.sampled import sampled
from support.servers.etcd import EtcdServer

from baton import AsyncClient
from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import media_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from models.demo.draw_examples import EXAMPLES
from models.demo.exercises.generate_data import chat_prompt, raw_prompt

# Many processes share two cores: slow is not wrong.
pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True, slots=True)
class Served:
    """A cluster of two encode workers, a prefill and a decode worker, and the model that it must agree with."""

    fleet: Fleet
    plain: PlainModel


WAYS = {"inline": 2**20, "leased": 0}
# What differs between the ways is how embeddings come to the prefill worker: tests/services/encode has that.
sampled_ways = pytest.mark.parametrize("served", sampled(WAYS, ["inline"]), indirect=True, scope="module")


@pytest.fixture(scope="module", params=WAYS)
def served(
    request: pytest.FixtureRequest, shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    plan = FleetPlan(
        namespace=f"images-{request.param}",
        etcd=shared_etcd.endpoint,
        worker=(
            *overrides("engine", {"kind": "pytorch", "model": DEMO, "name": "demo", "threads": 1}),
            f"encode.inline_bytes={WAYS[request.param]}",
        ),
        router=(PATIENT,),
        encode=2,
        prefill=1,
        decode=1,
    )
    with shared_fleet(plan, tmp_path_factory.mktemp(request.param)) as running:
        yield Served(running, PlainModel(DEMO))


@pytest_asyncio.fixture
async def stub(served: Served) -> AsyncIterator[InferenceServiceStub]:
    async with grpc.aio.insecure_channel(served.fleet.router.address) as channel:
        yield InferenceServiceStub(channel)


def plain_ids(plain: PlainModel, asked: Sequence[Question], form: object) -> list[tuple[int, ...]]:
    assert callable(form)
    return [plain.generate_about(form(each.exercise), each.pictures, MAX_TOKENS) for each in asked]


@pytest.mark.parametrize("count", sampled([30, 16], [16]))
@sampled_ways
async def test_greedy_ids_equal_the_plain_models_alone_and_sixteen_at_a_time(
    served: Served, stub: InferenceServiceStub, count: int
) -> None:
    # Those with two pictures first, so that a sample has all of them.
    asked = sorted(questions(30, "ids"), key=lambda each: len(each.pictures), reverse=True)[:count]
    assert sum(len(each.pictures) == 2 for each in asked) >= 4
    expected = plain_ids(served.plain, asked, raw_prompt)

    together = await generate_all(stub, [as_prompt(each) for each in asked], at_once=16)
    alone = await generate_all(stub, [as_prompt(each) for each in asked], at_once=1)

    assert [answer.ids for answer in together] == expected
    assert [answer.ids for answer in alone] == expected
    assert {answer.started.encoding for answer in together} <= {pb.ENCODING_WORKER, pb.ENCODING_CACHED}
    assert {worker for answer in together for worker in answer.started.encode_worker_ids} == {"encode-0", "encode-1"}
    assert {answer.started.encoding for answer in alone} == {pb.ENCODING_CACHED}
    assert all(answer.finished.topology == pb.TOPOLOGY_DISAGGREGATED for answer in together if len(answer.ids) > 1)


@sampled_ways
async def test_a_conversation_about_pictures_equals_the_plain_models(
    served: Served, stub: InferenceServiceStub
) -> None:
    asked = questions(7, "chat")
    answers = await generate_all(stub, [as_chat(each) for each in asked], at_once=7)
    assert [answer.ids for answer in answers] == plain_ids(served.plain, asked, chat_prompt)


@sampled_ways
@pytest.mark.feature("images", engine="pytorch", facade="grpc")
async def test_the_answer_depends_on_the_picture(stub: InferenceServiceStub) -> None:
    text = "What is in the picture?"
    files = [(EXAMPLES / name).read_bytes() for name in ("circle-and-square.png", "four-shapes.png")]
    answers = await generate_all(stub, [chat(text, [file]) for file in files], at_once=2)
    assert answers[0].text == "a red circle and a blue square"
    assert answers[1].text.count("a ") == 4


@sampled_ways
@pytest.mark.feature("embedding cache of images", engine="pytorch", facade="grpc")
async def test_the_same_picture_is_encoded_once(served: Served, stub: InferenceServiceStub) -> None:
    [asked] = questions(1, "once")
    first = await generate(stub, as_prompt(asked))
    second = await generate(stub, as_prompt(asked))
    assert first.started.encoding == pb.ENCODING_WORKER
    assert second.started.encoding == pb.ENCODING_CACHED
    assert (first.finished.usage.cached_embeddings, second.finished.usage.cached_embeddings) == (0, 1)
    assert second.finished.usage.media_tokens == 16
    assert not second.started.encode_worker_ids
    assert second.ids == first.ids


# Each is refused with its own status, and no process fails.


def _gif(size: tuple[int, int]) -> bytes:
    file = BytesIO()
    Image.new("P", size).save(file, "GIF")
    return file.getvalue()


def _zip_bomb() -> bytes:
    """A PNG whose text inflates to 64 MiB."""
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(64 * 2**20), 9))
    whole = picture()
    return whole[:33] + text + whole[33:]


def _lying_header() -> bytes:
    """A small PNG that says it has 20,000 x 20,000 pixels."""
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"x")) + chunk(b"IEND", b"")


INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
Bad = tuple[media_pb2.MediaItem, grpc.StatusCode]


def bad_media() -> list[Bad]:
    """Fifty and more."""
    png, jpeg, webp = picture("PNG"), picture("JPEG"), picture("WEBP")
    broken = [
        b"",
        b"\0" * 100,
        b"not an image",
        _lying_header(),
        vast_png(20_000),
        _zip_bomb(),
        bytes(30 * 2**20),
        animation("GIF"),
        animation("WEBP"),
        many_scans(200),
        _gif((60_000, 1)),
        *(png[:length] for length in range(8, len(png) - 12, len(png) // 12)),
        *(jpeg[:length] for length in range(3, len(jpeg) - 2, len(jpeg) // 12)),
        *(webp[:length] for length in range(12, len(webp) - 2, len(webp) // 8)),
    ]
    unsupported = [
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"<?xml version='1.0'?><svg/>",
        b"<html></html>",
        b"%PDF-1.7\n",
        b"PK\x03\x04" + bytes(100),
        b"\x1f\x8b" + bytes(100),
        picture("BMP"),
        picture("TIFF"),
    ]
    uris = {
        "data:image/png;base64,": INVALID,
        "data:image/png;base64,!!!!": INVALID,
        "data:text/plain,hello": UNIMPLEMENTED,
        "https://example.org/a.png": UNIMPLEMENTED,
        "file:///etc/passwd": UNIMPLEMENTED,
        "nonsense": INVALID,
    }
    return [
        *((media_pb2.MediaItem(data=content), INVALID) for content in broken),
        *((media_pb2.MediaItem(data=content), UNIMPLEMENTED) for content in unsupported),
        *((media_pb2.MediaItem(uri=uri), code) for uri, code in uris.items()),
        (media_pb2.MediaItem(data=png, mime_type="image/jpeg"), INVALID),
        (media_pb2.MediaItem(data=png, mime_type="image/svg+xml"), UNIMPLEMENTED),
        (media_pb2.MediaItem(data=png, modality=media_pb2.MODALITY_AUDIO), UNIMPLEMENTED),
        (media_pb2.MediaItem(data=png, modality=media_pb2.MODALITY_VIDEO), UNIMPLEMENTED),
        (media_pb2.MediaItem(), INVALID),
    ]


@sampled_ways
async def test_bad_media_are_each_refused_by_their_status_and_the_workers_serve_on(
    served: Served, stub: InferenceServiceStub
) -> None:
    bad = bad_media()
    assert len(bad) >= 50
    for item, code in bad:
        request = pb.GenerateRequest(prompt="<image>\nWhat is in the picture?", media=[item])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, request)
        assert caught.value.code() == code, (item.uri or item.data[:40], caught.value.details())
        # A request of this size is refused before it is parsed, without the index.
        assert any(path in str(caught.value.details()) for path in ("media[0]", "media.data"))
    asked = questions(4, "after bad ones")
    answers = await generate_all(stub, [as_prompt(each) for each in asked], at_once=4)
    assert [answer.ids for answer in answers] == plain_ids(served.plain, asked, raw_prompt)
    assert all(worker.is_alive for worker in served.fleet.workers)


@sampled_ways
async def test_a_hundred_megabytes_are_refused_as_a_fault_of_the_request(served: Served) -> None:
    async with AsyncClient(served.fleet.router.address) as client:
        with pytest.raises(InvalidRequest, match="larger than max"):
            await anext(client.generate("What is in the picture?", images=[bytes(100 * 2**20)]))
        assert await client.models()
