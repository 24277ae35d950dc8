"""Media fetched over `https:` from a real server on 127.0.0.1: what is followed, and where it may lead."""

import pytest
from support.images.fixed_resolver import FixedResolver
from support.images.pictures import picture
from support.images.site import Site
from support.servers.https import ok, redirect

from baton.errors import (
    FieldViolation,
    InvalidRequest,
    MediaUnavailable,
    PermissionDenied,
    Unsupported,
)
from media.config import FetchConfig, MediaConfig
from media.content import MediaItem
from media.loader import MediaLoader

PNG = picture("PNG")
ESCAPE = "has a space, a backslash, a control or a non-ASCII character: escape them"


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
