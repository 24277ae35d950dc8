"""Media in `data:` URIs."""

import base64
from urllib.parse import quote_from_bytes

import pytest
from support.images.pictures import picture
from support.memory import peak_memory

from baton.errors import InvalidRequest, Unsupported
from media.config import MediaConfig
from media.content import MediaItem
from media.loader import MediaLoader, load

PNG = picture("PNG")


def base64_uri(content: bytes, mime_type: str = "image/png") -> str:
    return f"data:{mime_type};base64,{base64.b64encode(content).decode()}"


async def test_a_base64_uri_is_decoded() -> None:
    media = await load(MediaItem("media[0]", base64_uri(PNG)), MediaConfig())
    assert media.content == PNG


async def test_a_percent_encoded_uri_is_decoded() -> None:
    large = picture("PNG", width=300, height=300)  # of several pieces, some of which end within an escape
    media = await load(MediaItem("media[0]", "data:image/png," + quote_from_bytes(large, safe="")), MediaConfig())
    assert media.content == large


@pytest.mark.parametrize("length", range(65530, 65545))
async def test_an_escape_on_the_border_of_two_pieces_stays_whole(length: int) -> None:
    content = PNG + b"\0" * length  # Pillow stops at the end of the image
    uri = "data:image/png," + quote_from_bytes(PNG, safe="") + "a" * length + "%00%01"
    media = await load(MediaItem("media[0]", uri), MediaConfig())
    assert media.content == content.replace(b"\0" * length, b"a" * length) + b"\0\1"


async def test_base64_may_be_percent_encoded_and_without_padding() -> None:
    text = base64.b64encode(PNG).decode().rstrip("=").replace("+", "%2B").replace("/", "%2F")
    media = await load(MediaItem("media[0]", f"DATA:image/png;BASE64,{text}"), MediaConfig())
    assert media.content == PNG


async def test_a_uri_without_a_type_gets_the_contents() -> None:
    media = await load(MediaItem("media[0]", base64_uri(PNG, "")), MediaConfig())
    assert media.mime_type == "image/png"


async def test_a_type_in_the_uri_that_is_not_the_contents_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="is image/jpeg, but the content is image/png"):
        await load(MediaItem("media[0]", base64_uri(PNG, "image/jpeg")), MediaConfig())


async def test_a_type_in_the_uri_that_is_not_the_items_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"media\[0\].mime_type: differs from the type that the data: URI gives"):
        await load(MediaItem("media[0]", base64_uri(PNG), "image/jpeg"), MediaConfig())


async def test_a_type_in_the_uri_that_is_not_accepted_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="'image/svg\\+xml' is not accepted; accepted are image/png, image/jpeg"):
        await load(MediaItem("media[0]", "data:image/svg+xml,<svg/>"), MediaConfig())


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("data:image/png;base64", "is a data: URI without a comma"),
        ("data:image/png;base64,!!!!", "is not valid base64"),
        ("data:image/png;base64,AAAAA", "is not valid base64"),
        ("data:image/png;base64,AA==AAAA", "is not valid base64"),
        ("data:image/png;base64," + "A" * (64 * 1024 - 2) + "==" + "A" * 64, "is not valid base64"),
        ("data:image/png;base64,ÄÄÄÄ", "is not valid base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:,", "is empty"),
    ],
)
async def test_a_broken_data_uri_is_refused_by_the_name_of_its_field(uri: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await load(MediaItem("media[3]", uri), MediaConfig())
    assert [(v.field, v.description) for v in refused.value.violations] == [("media[3].uri", problem)]


@pytest.mark.parametrize(("head", "length"), [("data:;base64,", 140_000_000), ("data:,", 100_000_000)])
async def test_a_hundred_megabytes_are_refused_before_they_are_decoded(head: str, length: int) -> None:
    uri = head + "A" * length
    async with MediaLoader(MediaConfig()) as loader:
        with peak_memory() as peak, pytest.raises(InvalidRequest, match="is larger than the limit of 20971520 bytes"):
            await loader.load(MediaItem("media[0]", uri))
    assert peak.megabytes < 200  # the cut that separates the payload from its head


async def test_escapes_of_every_byte_take_no_more_memory_than_the_uri() -> None:
    uri = "data:image/png," + "%41" * 4_000_000
    async with MediaLoader(MediaConfig()) as loader:
        with peak_memory() as peak, pytest.raises(InvalidRequest):
            await loader.load(MediaItem("media[0]", uri))
    assert peak.megabytes < 50


async def test_content_of_exactly_the_limit_passes() -> None:
    media = await load(MediaItem("media[0]", base64_uri(PNG)), MediaConfig(max_bytes=len(PNG)))
    assert media.content == PNG
