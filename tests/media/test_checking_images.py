"""Which images are accepted, and how each of the others is refused."""

import hashlib
import io
import random
import zipfile
import zlib
from contextlib import suppress
from functools import cache
from typing import Literal

import pytest
from PIL import Image
from support.images.pictures import animation, chunk, many_scans, picture, png_with, vast_png
from support.memory import peak_memory

from baton.errors import InvalidRequest, Unsupported
from media.config import MediaConfig
from media.content import CheckedMedia, MediaItem
from media.image import check_image
from media.loader import MediaLoader

TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
KINDS = sorted(TYPES)
SVG = b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'><rect width='9' height='9'/></svg>"


def check(content: bytes, mime_type: str = "", config: MediaConfig | None = None) -> CheckedMedia:
    return check_image(MediaItem("media[0]", content, mime_type), content, config or MediaConfig())


def refusal(content: bytes, mime_type: str = "", config: MediaConfig | None = None) -> tuple[str, str]:
    """The field and the problem of the one violation."""
    with pytest.raises(InvalidRequest) as refused:
        check(content, mime_type, config)
    [violation] = refused.value.violations
    return violation.field, violation.description


def zip_archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("zeros", bytes(10**8))
    return file.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_accepted_with_its_type_and_size(kind: str) -> None:
    media = check(picture(kind), TYPES[kind])
    assert (media.mime_type, media.width, media.height) == (TYPES[kind], 32, 24)


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_without_a_declared_type_gets_its_own(kind: str) -> None:
    assert check(picture(kind)).mime_type == TYPES[kind]


@pytest.mark.parametrize("declared", ["IMAGE/JPEG", "image/jpg", " image/jpeg; q=1"])
def test_a_type_may_be_spelled_differently(declared: str) -> None:
    assert check(picture("JPEG"), declared).mime_type == "image/jpeg"


def test_the_digest_is_of_the_content_as_it_came() -> None:
    content = picture("PNG")
    media = check(content)
    assert (media.content, media.digest) == (content, hashlib.sha256(content).digest())


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("PNG", "1"), ("PNG", "L"), ("PNG", "LA"), ("PNG", "P"), ("PNG", "RGBA"), ("JPEG", "CMYK"), ("WEBP", "RGBA")],
)
def test_every_colour_mode_is_accepted(kind: str, mode: str) -> None:
    assert check(picture(kind, mode=mode)).width == 32


def test_orientation_is_left_to_the_decoder() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    media = check(picture("JPEG", exif=exif))
    assert (media.width, media.height) == (32, 24)


def test_a_photograph_with_a_second_picture_inside_is_its_first() -> None:
    file, depth_map = io.BytesIO(), Image.new("L", (16, 12))
    Image.new("RGB", (32, 24)).save(file, "MPO", save_all=True, append_images=[depth_map])
    media = check(file.getvalue(), "image/jpeg")
    assert (media.mime_type, media.width) == ("image/jpeg", 32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("declared", sorted(TYPES.values()))
def test_a_declared_type_that_is_not_the_contents_is_refused(kind: str, declared: str) -> None:
    if declared == TYPES[kind]:
        assert check(picture(kind), declared).mime_type == declared
    else:
        problem = f"is {declared}, but the content is {TYPES[kind]}"
        assert refusal(picture(kind), declared) == ("media[0].mime_type", problem)


@pytest.mark.parametrize("declared", ["image/svg+xml", "image/bmp", "text/html", "application/octet-stream", "x"])
def test_a_declared_type_that_is_not_accepted_is_unsupported_and_those_that_are_are_listed(declared: str) -> None:
    with pytest.raises(Unsupported) as refused:
        check(picture("PNG"), declared)
    accepted = "accepted are image/png, image/jpeg, image/webp, image/gif"
    assert str(refused.value) == f"media[0].mime_type: {declared!r} is not accepted; {accepted}"


def test_a_type_that_the_configuration_leaves_out_is_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"media\[0\].data: image/gif is not accepted; accepted are image/png$"):
        check(picture("GIF"), config=MediaConfig(allowed_types=("image/png",)))


NO_IMAGES = {
    "SVG": SVG,
    "HTML": b"<!DOCTYPE html><html><body>no</body></html>",
    "XML": b"<?xml version='1.0'?><a/>",
    "a ZIP archive": zip_archive(),
    "a gzip archive": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    "PDF": b"%PDF-1.7\n",
    "BMP": picture("BMP"),
    "TIFF": picture("TIFF"),
    "AVIF or HEIF": b"\0\0\0\x1cftypavif\0\0\0\0",
    "MP4": b"\0\0\0\x1cftypisom\0\0\0\0",
    "JPEG 2000": picture("JPEG2000"),
    "text": b"Look at this picture",
}


SVG_PROLOGS = [
    b"<?xml version='1.0'?>\n",
    b"<!-- drawn -->\n<!---->",
    b"<!DOCTYPE svg PUBLIC 'x'>\n",
    b" <?xml version='1.0'?><!-- a > b -- c -->\n<!DOCTYPE svg>\n<!-- d -->\n",
]


@pytest.mark.parametrize("prolog", SVG_PROLOGS)
def test_an_svg_is_known_behind_what_may_stand_before_it(prolog: bytes) -> None:
    with pytest.raises(Unsupported, match="SVG is not accepted"):
        check(prolog + SVG)


@pytest.mark.parametrize("name", NO_IMAGES)
def test_content_of_another_kind_is_unsupported_by_its_name(name: str) -> None:
    with pytest.raises(Unsupported, match=rf"media\[0\].data: {name} is not accepted; accepted are image/png"):
        check(NO_IMAGES[name])


@pytest.mark.parametrize("name", NO_IMAGES)
def test_content_of_another_kind_that_says_it_is_an_image_is_refused_by_its_name(name: str) -> None:
    expected = ("media[0].mime_type", f"is image/png, but the content is {name}")
    assert refusal(NO_IMAGES[name], "image/png") == expected


def test_content_of_no_known_kind_is_refused() -> None:
    field, problem = refusal(b"\x01\x02\x03\x04" * 9)
    assert (field, problem.partition(";")[0]) == ("media[0].data", "is not an image")


def test_empty_content_is_refused() -> None:
    assert refusal(b"") == ("media[0].data", "is empty")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_truncated_picture_is_refused(kind: str, part: float) -> None:
    whole = picture(kind, width=100, height=100)
    assert refusal(whole[: int(len(whole) * part)]) == ("media[0].data", "is truncated or damaged")


@pytest.mark.parametrize("length", [9, 12, 20, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_of_nothing_but_its_first_bytes_is_refused(kind: str, length: int) -> None:
    assert refusal(picture(kind)[: max(length, 16 if kind == "WEBP" else 0)])[1] == "is truncated or damaged"


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_refused(kind: str) -> None:
    expected = ("media[0].data", "has more than one frame; only still images are accepted")
    assert refusal(animation(kind), TYPES[kind]) == expected


def test_a_picture_of_twenty_thousand_by_twenty_thousand_is_refused_before_it_is_decoded() -> None:
    content = vast_png(20_000)
    with peak_memory() as peak:
        assert refusal(content) == ("media[0].data", "has more pixels than the limit of 40000000")
    assert peak.megabytes < 20


# Where the two sides stand, in how many bytes each, in which order. A JPEG's are behind a marker.
SIZES: dict[str, tuple[int, int, Literal["big", "little"]]] = {
    "JPEG": (0, 2, "big"),
    "GIF": (6, 2, "little"),
    "WEBP": (26, 2, "little"),
    "PNG": (16, 4, "big"),
}


@pytest.mark.parametrize(("kind", "side"), [("JPEG", 65_000), ("GIF", 65_000), ("WEBP", 16_383), ("PNG", 2**31 - 1)])
def test_a_header_that_claims_to_be_vast_is_refused_before_it_is_believed(kind: str, side: int) -> None:
    content = bytearray(picture(kind))
    at, width, order = SIZES[kind]
    at = at or content.find(b"\xff\xc0") + 5
    content[at : at + 2 * width] = side.to_bytes(width, order) * 2
    if kind == "PNG":
        content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    with peak_memory() as peak:
        assert refusal(bytes(content))[1] == "has more pixels than the limit of 40000000"
    assert peak.megabytes < 20


def test_the_limit_of_pixels_is_itself_allowed() -> None:
    config = MediaConfig(max_pixels=100)
    assert check(picture(width=10, height=10), config=config).width == 10
    assert refusal(picture(width=10, height=11), config=config)[1] == "has more pixels than the limit of 100"


def test_a_picture_that_is_all_length_is_refused() -> None:
    expected = "has sides of 20100 and 100 pixels: over 1 to 200"
    assert refusal(picture(width=20_100, height=100))[1] == expected


def test_a_hundred_megabytes_are_refused_before_they_are_looked_at() -> None:
    content = picture("PNG") + bytes(100_000_000)
    with peak_memory() as peak:
        assert refusal(content)[1] == "is larger than the limit of 20971520 bytes"
    assert peak.megabytes < 5


@cache
def bomb() -> bytes:
    return zlib.compress(bytes(2 * 10**8), 9)


@pytest.mark.parametrize(
    ("kind", "head"),
    [(b"zTXt", b"Comment\0\0"), (b"iTXt", b"Comment\0\1\0\0\0"), (b"iCCP", b"profile\0\0")],
    ids=["zTXt", "iTXt", "iCCP"],
)
def test_a_decompression_bomb_beside_the_pixels_is_refused(kind: bytes, head: bytes) -> None:
    content = png_with(chunk(kind, head + bomb()))
    with peak_memory() as peak:
        assert refusal(content)[1] == "is truncated or damaged"
    assert peak.megabytes < 20


def test_many_texts_that_are_each_small_enough_are_refused_together() -> None:
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(900_000)))
    content = png_with(*[text] * 200)
    with peak_memory() as peak:
        assert refusal(content)[1] == "is truncated or damaged"
    assert peak.megabytes < 100  # Pillow keeps 64 MiB of text


def test_pixels_beyond_the_pictures_own_are_not_inflated() -> None:
    whole = picture("PNG", width=8, height=8)
    header, trailer = whole[: 8 + 25], whole[-12:]
    content = header + chunk(b"IDAT", bomb()) + trailer
    with peak_memory() as peak:
        assert check(content).width == 8
    assert peak.megabytes < 20


@pytest.mark.parametrize("padding", [b"\xff", b"\0"])
def test_a_jpeg_with_padding_that_is_read_byte_by_byte_is_refused(padding: bytes) -> None:
    whole = picture("JPEG")
    content = whole[:20] + padding * 10_000_000 + whole[20:]  # behind the first segment
    assert refusal(content)[1] == "has too many scans or too much padding"


def test_a_jpeg_that_draws_itself_a_thousand_times_is_refused() -> None:
    assert refusal(many_scans(1000))[1] == "has too many scans or too much padding"


def test_a_progressive_jpeg_is_accepted() -> None:
    assert check(picture("JPEG", progressive=True, width=200, height=200)).width == 200


def test_a_jpeg_with_a_film_behind_it_is_accepted() -> None:
    film = b"\xff\xda\0\2" * 100_000  # bytes that look like scans, if one looks behind the end
    assert check(picture("JPEG") + film).mime_type == "image/jpeg"


def test_a_jpeg_with_what_looks_like_scans_in_a_profile_is_accepted() -> None:
    assert check(picture("JPEG", icc_profile=b"\xff\xda" * 1000)).mime_type == "image/jpeg"


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_changed_in_a_picture_it_is_accepted_or_refused(kind: str) -> None:
    chance = random.Random(1)
    whole = picture(kind, width=16, height=16)
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(chance.choice([1, 2, 8])):
            content[chance.randrange(len(content))] = chance.randrange(256)
        with suppress(InvalidRequest, Unsupported):
            check(bytes(content), config=MediaConfig(max_pixels=10**6))


async def test_many_pictures_at_once_are_all_checked() -> None:
    async with MediaLoader(MediaConfig(decode_threads=1)) as loader:
        contents = [picture("PNG", width=10 + number) for number in range(10)]
        loaded = [await loader.load(MediaItem(f"media[{i}]", content)) for i, content in enumerate(contents)]
    assert [media.width for media in loaded] == list(range(10, 20))
