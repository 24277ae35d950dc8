"""The viewer's HTTP server with malformed and unusual requests."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.servers.otlp import viewing

from baton.errors import ConfigError
from devtools.trace_viewer.api import Viewer
from devtools.trace_viewer.http import serve_http


@pytest.fixture
async def viewer() -> AsyncIterator[Viewer]:
    async with viewing() as open_viewer:
        yield open_viewer


async def exchange(viewer: Viewer, request: bytes, answers: int = 1) -> bytes:
    """Everything that comes back until the connection is closed, or so many answers have come."""
    host, _, port = viewer.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    received = b""
    while chunk := await asyncio.wait_for(reader.read(65536), 50):
        received += chunk
        if received.count(b"HTTP/1.1 ") >= answers and b"\r\n\r\n" in received:
            break
    writer.close()
    return received


async def status(viewer: Viewer, request: bytes) -> int:
    return int((await exchange(viewer, request)).split()[1])


async def test_one_connection_serves_many_requests(viewer: Viewer) -> None:
    request = b"GET /api/services HTTP/1.1\r\nHost: localhost\r\n\r\n"
    received = await exchange(viewer, request * 3, answers=3)
    assert received.count(b"HTTP/1.1 200") == 3


async def test_the_page_loads_nothing_from_elsewhere(viewer: Viewer) -> None:
    received = await exchange(viewer, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", answers=2)
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"default-src 'none'" in head
    assert b"<title>Baton traces</title>" in body
    for outside in (b'src="http', b"@import", b"url(http", b'href="http'):
        assert outside not in body


async def test_head_has_no_body(viewer: Viewer) -> None:
    received = await exchange(viewer, b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", answers=2)
    assert received.split()[1] == b"200"
    assert received.endswith(b"\r\n\r\n")


async def test_only_reading_is_allowed(viewer: Viewer) -> None:
    assert await status(viewer, b"POST /api/services HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}") == 405


async def test_what_is_not_there_is_404(viewer: Viewer) -> None:
    assert await status(viewer, b"GET /api/other HTTP/1.1\r\nHost: localhost\r\n\r\n") == 404


async def test_a_name_that_merely_points_here_is_refused(viewer: Viewer) -> None:
    assert await status(viewer, b"GET /api/traces HTTP/1.1\r\nHost: evil.example:16686\r\n\r\n") == 421


@pytest.mark.parametrize("host", [b"localhost", b"127.0.0.1:16686", b"[::1]:16686", b"LOCALHOST:80"])
async def test_names_of_loopback_are_answered(viewer: Viewer, host: bytes) -> None:
    assert await status(viewer, b"GET /api/services HTTP/1.1\r\nHost: " + host + b"\r\n\r\n") == 200


@pytest.mark.parametrize("noise", [b"\x16\x03\x01 not HTTP\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"G" * 100_000])
async def test_noise_is_answered_as_a_bad_request(viewer: Viewer, noise: bytes) -> None:
    assert 400 <= await status(viewer, noise) < 500


async def test_a_port_that_is_taken_is_a_configuration_error(viewer: Viewer) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        async with serve_http(viewer.http_address, lambda target: None):  # type: ignore[arg-type,return-value]
            pass


async def test_connections_that_say_nothing_do_not_hold_up_the_end() -> None:
    async with viewing() as viewer:
        host, _, port = viewer.http_address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        await asyncio.sleep(0)
    writer.close()
