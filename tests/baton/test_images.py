"""Images given to the command and to the Python client, and in requests."""

from contextlib import aclosing
from pathlib import Path

import pytest
from support.cluster.in_process import bench
from support.images.pictures import picture
from support.images.simulated_workers import IMAGE_TOKENS, multimodal

from baton import AsyncClient
from baton.errors import InvalidRequest
from baton.images import Image
from baton.inference.v1 import generate_pb2
from cli.arguments import parse
from cli.request import build


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "a.png"
    path.write_bytes(picture())
    return str(path)


def built(*words: str) -> generate_pb2.GenerateRequest:
    return build(parse(["generate", *words]))


def test_images_come_before_the_words_of_a_users_message(file: str) -> None:
    [message] = built("What is that?", "--image", file, "--image", file).chat.messages
    assert message.role == "user"
    assert [part.WhichOneof("part") for part in message.parts] == ["media", "media", "text"]
    assert message.parts[0].media.data == picture()
    assert message.parts[2].text == "What is that?"


def test_a_system_message_stays_before_them(file: str) -> None:
    messages = built("What?", "--image", file, "--system", "Be brief.").chat.messages
    assert [message.role for message in messages] == ["system", "user"]
    assert messages[1].parts[0].HasField("media")


def test_a_uri_is_for_the_router_to_fetch() -> None:
    [message] = built("What?", "--image", "https://example.org/a.png").chat.messages
    assert message.parts[0].media.uri == "https://example.org/a.png"


def test_a_raw_prompt_has_its_images_beside_it(file: str) -> None:
    request = built("<image> What?", "--raw", "--image", file)
    assert request.prompt == "<image> What?"
    assert request.media[0].data == picture()


def test_token_ids_have_their_images_beside_them(file: str) -> None:
    request = built("5 257", "--token-ids", "--image", file)
    assert list(request.token_ids.ids) == [5, 257]
    assert len(request.media) == 1


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"image nowhere\.png: cannot be read: No such file"):
        built("What?", "--image", "nowhere.png")


async def test_the_python_client_sends_images_beside_a_string(file: str) -> None:
    async with bench(multimodal("e1", "encode"), multimodal("d1", "prefill", "decode")) as running:
        for image in (picture(), Path(file)):
            assert await media_tokens(running.address, image) == IMAGE_TOKENS


async def test_a_request_has_its_own_images() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="set them in the GenerateRequest instead"):
            await anext(client.generate(generate_pb2.GenerateRequest(prompt="x"), images=[picture()]))


async def media_tokens(address: str, image: Image) -> int:
    async with AsyncClient(address) as client, aclosing(client.generate("What?", images=[image])) as events:
        request = [event async for event in events]
    return request[-1].finished.usage.media_tokens
