"""Pictures by OpenAI's API, in a URL's data and behind one, as the official `openai` package sends them."""

import base64
from pathlib import Path
from typing import Any

import openai
import pytest
from support.certificates import Authority
from support.clients.openai_api import OPENAI_ROUTER, client_of, openai_bench
from support.cluster.demo import demo_worker
from support.engines.checkpoints import DEMO
from support.servers.https import ok, web

from media.config import FetchConfig, MediaConfig

PICTURE = DEMO / "examples" / "circle-and-square.png"
SEEN = "a red circle and a blue square"


def data_url(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def asking(url: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in the picture?"}]
    return [{"role": "user", "content": parts}]


@pytest.mark.feature("images", engine="pytorch", facade="openai")
async def test_the_demonstration_model_sees_a_picture() -> None:
    async with openai_bench(demo_worker("encode"), demo_worker("prefill"), demo_worker("decode")) as it:
        answer = await client_of(it).chat.completions.create(
            model="demo", messages=asking(data_url(PICTURE)), temperature=0
        )
        assert answer.choices[0].message.content == SEEN
        seen = await client_of(it).responses.create(
            model="demo",
            temperature=0,
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": data_url(PICTURE), "detail": "auto"},
                        {"type": "input_text", "text": "What is in the picture?"},
                    ],
                }
            ],
        )
        assert seen.output_text == SEEN


async def test_a_picture_is_fetched_by_its_url(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "pictures")
    async with web(authority.issue("web"), {"/a.png": ok(PICTURE.read_bytes())}) as site:
        hosts, networks = (f"127.0.0.1:{site.port}",), ("127.0.0.1/32",)
        fetch = FetchConfig(
            allowed_hosts=hosts, allowed_private_networks=networks, ca_file=str(authority.ca), timeout_seconds=60
        )
        router = OPENAI_ROUTER.model_copy(update={"media": MediaConfig(fetch=fetch)})
        async with openai_bench(
            demo_worker("encode"), demo_worker("prefill"), demo_worker("decode"), router=router
        ) as running:
            completions = client_of(running).chat.completions
            messages = asking(f"https://127.0.0.1:{site.port}/a.png")
            answer = await completions.create(model="demo", messages=messages, temperature=0)
            assert answer.choices[0].message.content == SEEN
            elsewhere = asking("https://example.org/a.png")
            with pytest.raises(openai.PermissionDeniedError) as refused:
                await completions.create(model="demo", messages=elsewhere)
            assert refused.value.param == "messages[0].content[0].image_url.url"
            assert "messages[0].content[0].image_url.url: the URI leads to a host" in str(refused.value)
    assert len(site.requests) == 1
