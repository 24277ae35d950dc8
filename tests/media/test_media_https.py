"""Media fetched over `https:` from a real server on 127.0.0.1, well-behaved and otherwise."""

import asyncio
import gzip
import time
from collections.abc import Mapping
from typing import Any

import pytest
from support.certificates import Authority, Pair
from support.images.fixed_resolver import FixedResolver
from support.images.pictures import picture
from support.memory import peak_memory
from support.servers.https import Answer, Web, ok, redirect, web

from baton.errors import (
    ConfigError,
    DeadlineExceeded,
    FieldViolation,
    InvalidRequest,
    MediaUnavailable,
    PermissionDenied,
    Unsupported,
)
from media.config import FetchConfig, MediaConfig
from media.item import CheckedMedia, MediaItem
from media.loader import MediaLoader
from media.sources.addresses import Resolver

PNG = picture("PNG")
LOOPBACK = ("127.0.0.1/32",)
ESCAPE = "has a space, a backslash, a control or a non-ASCII character: escape them"


class Site:
    """A server with its answers, and what fetching from it takes."""

    def __init__(self, authority: Authority, certificate: Pair) -> None:
        self._authority = authority
        self._certificate = certificate
        self.requests: list[str] = []

    async def load(
        self,
        answers: Mapping[str, Answer],
        uri: str = "https://127.0.0.1:PORT/a.png",
        *,
        resolver: Resolver | None = None,
        max_bytes: int = 2**20,
        **fetch: object,
    ) -> CheckedMedia:
        """Loads `uri` while a server gives `answers`. PORT is the server's, in the URI, in answers and in settings."""
        answers = dict(answers)
        async with web(self._certificate, answers) as server:
            for path, answer in answers.items():
                if isinstance(answer, bytes):
                    answers[path] = answer.replace(b"PORT", str(server.port).encode())
            self.requests = server.requests
            config = MediaConfig(max_bytes=max_bytes, fetch=self._settings(server, fetch))
            async with MediaLoader(config, resolver) as loader:
                return await loader.load(MediaItem("media[0]", uri.replace("PORT", str(server.port))))

    def _settings(self, server: Web, fetch: Mapping[str, object]) -> FetchConfig:
        settings: dict[str, Any] = {
            "allowed_hosts": ("127.0.0.1:PORT",),
            "allowed_private_networks": LOOPBACK,
            "ca_file": str(self._authority.ca),
            **fetch,
        }
        hosts = [host.replace("PORT", str(server.port)) for host in settings["allowed_hosts"]]
        return FetchConfig.model_validate({**settings, "allowed_hosts": hosts})


@pytest.fixture
def site(authority: Authority, certificate: Pair) -> Site:
    return Site(authority, certificate)


async def test_an_image_is_fetched(site: Site) -> None:
    assert (await site.load({"/a.png": ok(PNG)})).content == PNG


async def test_an_image_without_a_length_is_fetched(site: Site) -> None:
    assert (await site.load({"/a.png": b"HTTP/1.1 200 OK\r\n\r\n" + PNG})).content == PNG


async def test_an_image_in_chunks_is_fetched(site: Site) -> None:
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(PNG[i : i + 100]), PNG[i : i + 100]) for i in range(0, len(PNG), 100))
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"
    assert (await site.load({"/a.png": answer})).content == PNG


async def test_the_query_is_sent_and_the_fragment_is_not(site: Site) -> None:
    await site.load({"/a.png?size=1": ok(PNG)}, "https://127.0.0.1:PORT/a.png?size=1#top")
    assert site.requests[0].startswith("GET /a.png?size=1 HTTP/1.1\r\n")


async def test_a_request_carries_no_more_than_it_must(site: Site) -> None:
    await site.load({"/a.png": ok(PNG, "Set-Cookie: a=b")})
    names = [line.partition(":")[0].lower() for line in site.requests[0].split("\r\n")[1:] if line]
    assert names == ["host", "user-agent", "accept", "accept-encoding", "connection"]


async def test_the_connection_goes_to_the_address_that_was_checked(site: Site) -> None:
    # No other resolver knows this name, and the answer is asked for once: there is nothing to rebind.
    resolver = FixedResolver({"images.example.org": ["127.0.0.1"]})
    uri, hosts = "https://images.example.org:PORT/a.png", ("*.example.org:PORT",)
    media = await site.load({"/a.png": ok(PNG)}, uri, resolver=resolver, allowed_hosts=hosts)
    assert (media.content, resolver.asked) == (PNG, ["images.example.org"])


async def test_a_second_address_is_tried_when_the_first_does_not_answer(site: Site) -> None:
    resolver = FixedResolver({"images.example.org": ["127.0.0.2", "127.0.0.1"]})
    uri, hosts = "https://images.example.org:PORT/a.png", ("images.example.org:PORT",)
    networks = ("127.0.0.0/8",)
    media = await site.load(
        {"/a.png": ok(PNG)}, uri, resolver=resolver, allowed_hosts=hosts, allowed_private_networks=networks
    )
    assert media.content == PNG


async def test_the_systems_resolver_is_asked_by_default(site: Site) -> None:
    uri, hosts = "https://localhost:PORT/a.png", ("localhost:PORT",)
    networks = ("127.0.0.1/32", "::1/128")
    media = await site.load({"/a.png": ok(PNG)}, uri, allowed_hosts=hosts, allowed_private_networks=networks)
    assert media.content == PNG


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_followed(site: Site, status: int) -> None:
    answers = {"/a.png": redirect("https://127.0.0.1:PORT/b.png", status), "/b.png": ok(PNG)}
    assert (await site.load(answers)).content == PNG


async def test_a_relative_redirect_is_followed(site: Site) -> None:
    answers = {"/a.png": redirect("pictures/b.png"), "/pictures/b.png": ok(PNG)}
    assert (await site.load(answers)).content == PNG


async def test_a_private_address_is_refused(site: Site) -> None:
    with pytest.raises(PermissionDenied, match=r"media\[0\].uri: the URI leads to an address that is not public"):
        await site.load({"/a.png": ok(PNG)}, allowed_private_networks=())
    assert site.requests == []


@pytest.mark.parametrize(
    "addresses",
    [["10.0.0.1"], ["127.0.0.1", "10.0.0.1"], ["10.0.0.1", "127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["fe80::1"]],
)
async def test_a_name_with_one_private_address_is_refused(site: Site, addresses: list[str]) -> None:
    resolver = FixedResolver({"images.example.org": addresses})
    uri, hosts = "https://images.example.org:PORT/a.png", ("*:PORT",)
    with pytest.raises(PermissionDenied) as refused:
        await site.load({"/a.png": ok(PNG)}, uri, resolver=resolver, allowed_hosts=hosts)
    assert site.requests == []
    assert not any(address in str(refused.value) for address in addresses)


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "[::1]", "[::ffff:127.0.0.1]"])
async def test_other_spellings_of_a_private_address_are_refused(site: Site, host: str) -> None:
    uri = f"https://{host}:PORT/a.png"
    with pytest.raises(PermissionDenied, match="an address that is not public"):
        await site.load({"/a.png": ok(PNG)}, uri, allowed_hosts=("*:PORT",), allowed_private_networks=())


async def test_a_redirect_to_a_private_address_is_refused_and_not_named(site: Site) -> None:
    resolver = FixedResolver({"127.0.0.1": ["127.0.0.1"], "metadata.internal": ["169.254.169.254"]})
    answers = {"/a.png": redirect("https://metadata.internal:PORT/secret")}
    with pytest.raises(PermissionDenied) as refused:
        await site.load(answers, resolver=resolver, allowed_hosts=("*:PORT",))
    assert str(refused.value) == "media[0].uri: a redirect leads to an address that is not public"


async def test_a_redirect_to_another_host_is_refused_and_not_named(site: Site) -> None:
    with pytest.raises(PermissionDenied) as refused:
        await site.load({"/a.png": redirect("https://internal.example.org:PORT/")})
    assert str(refused.value) == "media[0].uri: a redirect leads to a host or port that is not allowed"


@pytest.mark.parametrize("location", ["http://127.0.0.1:PORT/b.png", "file:///etc/passwd", "data:image/png;base64,AA"])
async def test_a_redirect_to_another_scheme_is_refused(site: Site, location: str) -> None:
    with pytest.raises(PermissionDenied, match="a redirect leads away from https:"):
        await site.load({"/a.png": redirect(location), "/b.png": ok(PNG)})


async def test_redirects_end_somewhere(site: Site) -> None:
    with pytest.raises(InvalidRequest, match="is redirected more than 3 times"):
        await site.load({"/a.png": redirect("/a.png")})
    assert len(site.requests) == 4


async def test_a_redirect_to_nonsense_is_refused(site: Site) -> None:
    with pytest.raises(InvalidRequest, match="is redirected to something that is not a URI"):
        await site.load({"/a.png": redirect("https://[::1/")})


@pytest.mark.parametrize(
    ("allowed", "uri"),
    [
        ("example.org", "https://evil.org/a.png"),
        ("example.org", "https://example.org.evil.org/a.png"),
        ("example.org", "https://notexample.org/a.png"),
        ("example.org", "https://example.org:8443/a.png"),
        ("example.org", "https://sub.example.org/a.png"),
        ("*.example.org", "https://example.org/a.png"),
        ("*.example.org", "https://evilexample.org/a.png"),
        ("example.org:8443", "https://example.org/a.png"),
    ],
)
async def test_a_host_or_port_that_is_not_allowed_is_refused_without_being_resolved(allowed: str, uri: str) -> None:
    resolver = FixedResolver({})
    async with MediaLoader(MediaConfig(fetch=FetchConfig(allowed_hosts=(allowed,))), resolver) as loader:
        with pytest.raises(PermissionDenied, match="a host or port that is not allowed"):
            await loader.load(MediaItem("media[0]", uri))
    assert resolver.asked == []


@pytest.mark.parametrize(
    ("allowed", "uri"),
    [
        ("example.org", "https://EXAMPLE.org./a.png"),
        ("example.org:443", "https://example.org/a.png"),
        ("*.example.org", "https://a.b.example.org/a.png"),
        ("*", "https://example.org/a.png"),
        ("[2001:db8::1]:8443", "https://[2001:DB8::1]:8443/a.png"),
    ],
)
async def test_an_allowed_host_is_resolved(allowed: str, uri: str) -> None:
    resolver = FixedResolver({})
    async with MediaLoader(MediaConfig(fetch=FetchConfig(allowed_hosts=(allowed,))), resolver) as loader:
        with pytest.raises(MediaUnavailable, match="cannot be resolved"):
            await loader.load(MediaItem("media[0]", uri))
    assert len(resolver.asked) == 1


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("https://user:secret@127.0.0.1/", "has a user name or password, which are not sent"),
        ("https://user@127.0.0.1/", "has a user name or password, which are not sent"),
        ("https:///a.png", "has no host"),
        ("https://127.0.0.1:99999/", "has no valid port"),
        ("https://[::1/", "is not a valid URI"),
        ("https://127.0.0.1\\@evil.org/", ESCAPE),
        (
            "https://127.0.0.1/\r\nHost: evil.org",
            ESCAPE,
        ),
        ("https://exämple.org/", ESCAPE),
        ("https://127.0.0.1/" + "a" * 9000, "is longer than 8192 characters"),
    ],
)
async def test_an_ambiguous_uri_is_refused(site: Site, uri: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await site.load({}, uri, allowed_hosts=("*",))
    assert refused.value.violations == (FieldViolation("media[0].uri", problem),)


async def test_a_type_that_is_not_accepted_is_refused_before_anything_is_fetched() -> None:
    resolver = FixedResolver({})
    async with MediaLoader(MediaConfig(fetch=FetchConfig(allowed_hosts=("*",))), resolver) as loader:
        with pytest.raises(Unsupported, match=r"media\[0\].mime_type: 'image/tiff' is not accepted"):
            await loader.load(MediaItem("media[0]", "https://example.org/a.tiff", "image/tiff"))
    assert resolver.asked == []


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
        await asyncio.sleep(5)

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
            await asyncio.wait_for(gone.wait(), 5)
    assert loading.cancelled()
