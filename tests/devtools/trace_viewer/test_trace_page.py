"""The page, in a real browser."""

import re
from collections.abc import Awaitable, Callable
from html import unescape
from pathlib import Path

import pytest
from support.clients.browser import chromium, dump_dom, screenshot
from support.servers.otlp import Made, trace_id, viewing

REQUEST = (
    Made(1, 1, name="baton.inference.v1.InferenceService/Generate", service="baton-router", milliseconds=100),
    Made(1, 2, parent=1, name="prefill", service="baton-router", start=5, milliseconds=30),
    Made(1, 3, parent=2, name="compute", service="baton-prefill", start=10, milliseconds=20),
    Made(1, 4, parent=1, name="decode", service="baton-router", start=40, milliseconds=55, links=[(1, 2)]),
)
FAILED = Made(2, 1, name="generate", error="gone", attributes={"baton.outcome": "NO_WORKER"}, start=500)
CANCELLED = Made(3, 1, name="generate", attributes={"baton.outcome": "CANCELLED"}, start=900)

Look = Callable[..., Awaitable[str]]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """The HTML that a browser makes of a path, where these spans have come."""
    chromium()

    async def page(path: str, *made: Made) -> str:
        async with viewing(*made) as viewer:
            return await dump_dom(viewer.url + path, tmp_path / "profile")

    return page


def texts(html: str, css_class: str) -> list[str]:
    """The text of every element of that class."""
    found = re.findall(rf'<(\w+)[^>]*class="{css_class}"[^>]*>(.*?)</\1>', html, re.DOTALL)
    return [unescape(re.sub("<[^>]*>", " ", text)).strip() for _, text in found]


async def test_the_list_shows_each_trace_with_its_name_and_its_outcome(look: Look) -> None:
    html = await look("/", *REQUEST, FAILED, CANCELLED)
    rows = re.findall(r"<tr data-id.*?</tr>", html, re.DOTALL)
    plain = [re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", row)) for row in rows]
    assert ["cancelled" in plain[0], "NO_WORKER" in plain[1], "InferenceService/Generate" in plain[2]] == [True] * 3
    assert "baton-prefill" in plain[2]
    assert "100 ms" in plain[2]


async def test_without_traces_the_list_says_how_to_get_one(look: Look) -> None:
    assert "baton generate" in await look("/")


async def test_a_trace_is_a_tree_with_bars_in_proportion(look: Look) -> None:
    html = await look(f"/trace/{trace_id(1)}", *REQUEST)
    assert re.findall(r'aria-level="(\d)" aria-label="([^,"]*)', html) == [
        ("1", "baton.inference.v1.InferenceService/Generate"),
        ("2", "prefill"),
        ("3", "compute"),
        ("2", "decode"),
    ]
    bars = re.findall(r'class="span" style="left: ([\d.]+)%; width: ([\d.]+)%', html)
    assert [(float(left), float(width)) for left, width in bars] == [(0, 100), (5, 30), (10, 20), (40, 55)]
    assert texts(html, "took") == ["100 ms", "30.0 ms", "20.0 ms", "55.0 ms"]


async def test_details_name_attributes_events_and_links(look: Look) -> None:
    detailed = Made(
        1, 4, parent=1, name="decode", links=[(1, 1)], attributes={"tokens": 7}, events=[("late", {"why": "queue"})]
    )
    html = await look(f"/trace/{trace_id(1)}#s{4:016x}", REQUEST[0], detailed)
    for expected in (">tokens<", ">7<", ">late<", ">queue<", "InferenceService/Generate (baton-router)"):
        assert expected in html


async def test_a_span_whose_parent_is_missing_is_shown_and_said_to_be_one(look: Look) -> None:
    html = await look(f"/trace/{trace_id(1)}", REQUEST[0], Made(1, 9, parent=8, name="lost child"))
    assert "lost child" in html
    assert texts(html, "problem") == ["1 span names a parent that has not arrived"]


async def test_a_trace_that_is_gone_is_said_to_be(look: Look) -> None:
    assert "trace not found" in await look(f"/trace/{trace_id(7)}")


async def test_what_a_span_says_is_never_markup(look: Look) -> None:
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    html = await look(f"/trace/{trace_id(1)}#s{1:016x}", Made(1, 1, name=evil, service=evil, attributes={evil: evil}))
    main = html[html.index("<main") : html.index("</main>")]
    assert "<img" not in main
    assert "<script" not in main
    assert "&lt;img" in main


async def test_it_can_be_drawn(look: Look, tmp_path: Path) -> None:
    picture = tmp_path / "trace.png"
    async with viewing(*REQUEST) as viewer:
        await screenshot(f"{viewer.url}/trace/{trace_id(1)}", tmp_path / "profile", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
