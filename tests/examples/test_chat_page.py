"""The chat page of examples/web, in a real browser: gRPC-Web through a real Envoy, to real workers."""

import functools
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.clients.browser import chromium
from support.clients.devtools import Page, open_page
from support.clients.examples import EXAMPLES, WITHIN_SECONDS, Program
from support.cluster.demo import demo_worker
from support.cluster.in_process import PATIENT, Bench, bench, simulated
from support.engines.checkpoints import DEMO
from support.eventually import eventually
from support.servers.envoy import Envoy, running_envoy
from support.servers.etcd import free_port

# The first test builds the page, on two cores that others use too.
pytestmark = WITHIN_SECONDS

ANSWER = "[...document.querySelectorAll('.turn.assistant')].at(-1)"
TEXT = f"{ANSWER}?.querySelector('.text').textContent"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of the built page."""
    chromium()
    Program("web", (), ("node", "npm")).build()
    handler = functools.partial(QuietHandler, directory=str(EXAMPLES / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@asynccontextmanager
async def demo(folder: Path) -> AsyncIterator[Envoy]:
    """Workers of all roles that serve the demonstration model, behind Envoy."""
    workers = [demo_worker(role) for role in ("encode", "prefill", "decode")]
    async with bench(*workers, router=PATIENT) as running, running_envoy(folder, [running.address]) as envoy:
        yield envoy


@asynccontextmanager
async def slow(folder: Path) -> AsyncIterator[tuple[Bench, Envoy]]:
    """Workers that take 20 ms a token and do not stop soon, behind Envoy."""
    workers = simulated("p", "prefill"), simulated("d", "decode", decode_step_seconds=0.02)
    async with bench(*workers, router=PATIENT) as running, running_envoy(folder, [running.address]) as envoy:
        yield running, envoy


@asynccontextmanager
async def chat(site: str, api: str, folder: Path) -> AsyncIterator[Page]:
    """The page, once it knows the models. A script that fails fails the test."""
    async with open_page(f"{site}/?api=http://{api}", folder / "profile") as page:
        await page.until("document.querySelector('#model').value")
        yield page
        assert page.problems == []


async def test_a_question_about_a_picture_and_one_without_are_answered(site: str, tmp_path: Path) -> None:
    async with demo(tmp_path) as envoy, chat(site, envoy.address, tmp_path) as page:
        await page.choose_files("#images", [DEMO / "examples" / "circle-and-square.png"])
        await page.until("document.querySelector('#attachments img')?.naturalWidth")
        await page.type("#prompt", "What is in the picture?")
        await page.click("#send")
        await page.until(f"{ANSWER}?.matches('.done, .failed')")
        assert await page.evaluate(TEXT) == "a red circle and a blue square"
        assert "prefill-0 → decode-0" in await page.evaluate(f"{ANSWER}.querySelector('.note').textContent")
        assert await page.evaluate("document.querySelector('.turn.user img').alt") == "circle-and-square.png"

        await page.click("#clear")
        await page.type("#prompt", "Sort: pear apple mango")
        await page.press_enter()
        await page.until(f"{ANSWER}?.matches('.done, .failed')")
        assert await page.evaluate(TEXT) == "apple mango pear"


async def test_stop_ends_an_answer_that_streams_and_its_request_on_the_workers(site: str, tmp_path: Path) -> None:
    async with slow(tmp_path) as (running, envoy), chat(site, envoy.address, tmp_path) as page:
        await page.type("#prompt", "hello")
        await page.click("#send")
        await page.until(f"{TEXT}?.length > 3")
        assert await page.evaluate(f"{ANSWER}.matches('.running')")
        assert running.used_blocks() > 0
        await page.click("#stop")
        await page.until(f"{ANSWER}.matches('.stopped')")
        await eventually(lambda: running.used_blocks() == 0)
        assert await page.evaluate("!document.querySelector('#send').hidden")


async def test_a_model_that_draws_shows_its_progress_and_then_the_picture(site: str, tmp_path: Path) -> None:
    worker = simulated("f", "diffuse", draw_step_seconds=0.15)
    painter = worker.model_copy(update={"engine": worker.engine.model_copy(update={"name": "painter"})})
    async with (
        bench(painter, router=PATIENT) as running,
        running_envoy(tmp_path, [running.address]) as envoy,
        chat(site, envoy.address, tmp_path) as page,
    ):
        await page.type("#prompt", "a red circle")
        await page.click("#send")
        await page.until(f"{ANSWER}?.querySelector('progress')?.value > 1 && {ANSWER}.querySelector('img.drawn')")
        assert await page.evaluate(f"{ANSWER}.querySelector('img').alt") == "a preview"
        await page.until(f"{ANSWER}.matches('.done')")
        await page.until(f"{ANSWER}.querySelector('img').naturalWidth === 64")
        assert await page.evaluate(f"{ANSWER}.querySelector('img').alt") == "a red circle"
        assert await page.evaluate(f"{ANSWER}.querySelector('progress') === null")
        assert "64 × 64 · seed" in await page.evaluate(f"{ANSWER}.querySelector('.note').textContent")

        await page.type("#prompt", "another")
        await page.click("#send")
        await page.until(f"{ANSWER}?.querySelector('progress')")
        await page.click("#stop")
        await page.until(f"{ANSWER}.matches('.stopped')")
        await eventually(lambda: running.workers["f"].engines.load().running == 0)


async def test_an_error_is_shown_with_its_reason_and_its_fields(site: str, tmp_path: Path) -> None:
    async with slow(tmp_path) as (_, envoy), chat(site, envoy.address, tmp_path) as page:
        await page.evaluate("document.querySelector('#temperature').value = -1")
        await page.type("#prompt", "hello")
        await page.click("#send")
        await page.until(f"{ANSWER}?.matches('.failed')")
        assert await page.evaluate(f"{ANSWER}.querySelector('.reason').textContent") == "INVALID_REQUEST"
        shown = await page.evaluate(f"{ANSWER}.querySelector('.field').textContent")
        assert shown == "sampling.temperature must be at least 0, is -1"


async def test_an_envoy_that_is_not_there_is_named(site: str, tmp_path: Path) -> None:
    api = f"http://127.0.0.1:{free_port()}"
    async with open_page(f"{site}/?api={api}", tmp_path / "profile") as page:
        await page.until(f"{ANSWER}?.matches('.failed')")
        assert api in await page.evaluate(f"{ANSWER}.querySelector('.hints').textContent")
