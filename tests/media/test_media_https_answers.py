"""Media fetched over `https:` from a real server on 127.0.0.1 that answers badly, slowly, or not at all."""

import asyncio
import gzip
import time

import pytest
from support.certificates import Authority, Pair
from support.images.fixed_resolver import FixedResolver
from support.images.pictures import picture
from support.images.site import LOOPBACK, Site
from support.memory import peak_memory
from support.servers.https import ok, redirect, web

from baton.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    MediaUnavailable,
    Unsupported,
)
from media.config import FetchConfig, MediaConfig
from media.content import MediaItem
from media.loader import MediaLoader

PNG = picture("PNG")


async def test_a_body_without_end_is_read_to_the_limit_and_no_further(site: Site) -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing():
            writer.write(bytes(64 * 1024))
            await writer.drain()
            await asyncio.sleep(0)  # drain alone would not let the loop notice that the client has gone
            sent += 64 * 1024

    with peak_memory() as peak, pytest.raises(InvalidRequest, match="is larger than the limit of 1048576 bytes"):
        await site.load({"/a.png": endless})
    assert peak.megabytes < 30
    assert sent < 16 * 2**20  # what the sockets hold, beyond the limit


async def test_a_body_over_the_limit_by_its_own_word_is_not_read(site: Site) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1048577\r\n\r\n"
    with pytest.raises(InvalidRequest, match="is larger than the limit of 1048576 bytes"):
        await site.load({"/a.png": answer})


async def test_a_length_of_a_thousand_digits_is_refused(site: Site) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"
    with pytest.raises((InvalidRequest, MediaUnavailable)):
        await site.load({"/a.png": answer})


async def test_a_body_that_is_shorter_than_promised_is_a_broken_connection(site: Site) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + PNG
    with pytest.raises(MediaUnavailable, match="the server closed the connection"):
        await site.load({"/a.png": answer})


async def test_a_body_that_is_longer_than_promised_is_cut_there_and_refused(site: Site) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + PNG
    with pytest.raises(InvalidRequest, match="is truncated or damaged"):
        await site.load({"/a.png": answer})


async def test_chunks_over_the_limit_are_refused(site: Site) -> None:
    body = b"%x\r\n%b\r\n" % (2**19, bytes(2**19))
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + 3 * body + b"0\r\n\r\n"
    with pytest.raises(InvalidRequest, match="is larger than the limit"):
        await site.load({"/a.png": answer})


async def test_a_compressed_body_is_refused_unread(site: Site) -> None:
    bomb = gzip.compress(bytes(50 * 2**20))
    with peak_memory() as peak, pytest.raises(InvalidRequest, match="sent it compressed, which was not requested"):
        await site.load({"/a.png": ok(bomb, "Content-Encoding: gzip")})
    assert "accept-encoding: identity" in site.requests[0].lower()
    assert peak.megabytes < 30


async def test_a_compressed_transfer_is_refused(site: Site) -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
    with pytest.raises(MediaUnavailable):
        await site.load({"/a.png": answer})


async def test_a_body_that_drips_ends_with_the_time_limit(site: Site) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"\0")
            await writer.drain()
            await asyncio.sleep(0.02)

    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"media\[0\].uri: not fetched within 0.5 s"):
        await site.load({"/a.png": drip}, timeout_seconds=0.5)
    assert time.monotonic() - started < 20


async def test_the_time_limit_is_for_all_redirects_together(site: Site) -> None:
    async def slow(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.4)
        writer.write(redirect("/a.png"))

    with pytest.raises(DeadlineExceeded):
        await site.load({"/a.png": slow}, timeout_seconds=0.6)


async def test_a_server_that_says_nothing_ends_with_the_time_limit(site: Site) -> None:
    async def silence(writer: asyncio.StreamWriter) -> None:
        await writer.wait_closed()  # by the client

    with pytest.raises(DeadlineExceeded):
        await site.load({"/a.png": silence}, timeout_seconds=0.3)


async def test_headers_without_end_are_refused(site: Site) -> None:
    with pytest.raises(MediaUnavailable):
        await site.load({"/a.png": b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"a" * 200_000})


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
async def test_what_is_no_answer_is_a_broken_connection(site: Site, answer: bytes) -> None:
    with pytest.raises(MediaUnavailable, match="closed the connection or does not speak HTTP"):
        await site.load({"/a.png": answer})


@pytest.mark.parametrize("status", [204, 206, 304, 400, 401, 403, 404, 410])
async def test_a_refusal_by_the_server_is_an_invalid_request(site: Site, status: int) -> None:
    with pytest.raises(InvalidRequest, match=f"the server answered {status}"):
        await site.load({"/a.png": f"HTTP/1.1 {status} No\r\n\r\n".encode()})


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
async def test_a_failure_of_the_server_is_unavailable(site: Site, status: int) -> None:
    with pytest.raises(MediaUnavailable, match=f"the server answered {status}"):
        await site.load({"/a.png": f"HTTP/1.1 {status} No\r\n\r\n".encode()})


async def test_a_page_instead_of_an_image_is_unsupported_and_not_shown(site: Site) -> None:
    with pytest.raises(Unsupported, match="HTML is not accepted") as refused:
        await site.load({"/a.png": ok(b"<!doctype html><p>secret")})
    assert "secret" not in str(refused.value)


async def test_a_certificate_for_another_name_is_refused(site: Site) -> None:
    resolver = FixedResolver({"other.example.com": ["127.0.0.1"]})
    with pytest.raises(MediaUnavailable, match="TLS or certificate is invalid"):
        await site.load({}, "https://other.example.com:PORT/", resolver=resolver, allowed_hosts=("*:PORT",))


async def test_a_certificate_of_an_unknown_authority_is_refused(site: Site) -> None:
    with pytest.raises(MediaUnavailable, match="TLS or certificate is invalid"):
        await site.load({"/a.png": ok(PNG)}, ca_file="")
    assert site.requests == []


async def test_a_port_without_a_listener_is_unavailable(authority: Authority, certificate: Pair) -> None:
    async with web(certificate, {}) as server:
        port = server.port
    fetch = FetchConfig(allowed_hosts=(f"127.0.0.1:{port}",), allowed_private_networks=LOOPBACK)
    async with MediaLoader(MediaConfig(fetch=fetch)) as loader:
        with pytest.raises(MediaUnavailable, match="cannot be reached"):
            await loader.load(MediaItem("media[0]", f"https://127.0.0.1:{port}/"))


async def test_certificates_that_cannot_be_read_are_a_wrong_configuration() -> None:
    with pytest.raises(ConfigError, match=r"fetch.ca_file: /nowhere.pem"):
        MediaLoader(MediaConfig(fetch=FetchConfig(allowed_hosts=("example.org",), ca_file="/nowhere.pem")))


@pytest.mark.parametrize("scheme", ["https", "http", "file", "ftp", "gopher"])
async def test_a_scheme_that_is_not_enabled_is_unsupported(scheme: str) -> None:
    async with MediaLoader(MediaConfig()) as loader:
        with pytest.raises(Unsupported) as refused:
            await loader.load(MediaItem("media[0]", f"{scheme}://127.0.0.1/a.png"))
    assert str(refused.value) == f"media[0].uri: {scheme}: is not enabled; enabled are data:"


async def test_http_is_unsupported_also_for_allowed_hosts(site: Site) -> None:
    with pytest.raises(Unsupported, match="http: is not enabled; enabled are data:, https:"):
        await site.load({}, "http://127.0.0.1:PORT/a.png")


async def test_cancelling_ends_the_connection(authority: Authority, certificate: Pair) -> None:
    connected, gone = asyncio.Event(), asyncio.Event()

    async def hold(writer: asyncio.StreamWriter) -> None:
        connected.set()
        try:
            while not writer.is_closing():
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            gone.set()

    async with web(certificate, {"/": hold}) as server:
        hosts = (f"127.0.0.1:{server.port}",)
        fetch = FetchConfig(allowed_hosts=hosts, allowed_private_networks=LOOPBACK, ca_file=str(authority.ca))
        async with MediaLoader(MediaConfig(fetch=fetch)) as loader:
            loading = asyncio.ensure_future(loader.load(MediaItem("media[0]", f"https://127.0.0.1:{server.port}/")))
            await connected.wait()
            loading.cancel()
            await asyncio.wait_for(gone.wait(), 50)
    assert loading.cancelled()
