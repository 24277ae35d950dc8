"""The official client of Anthropic's API, for routers that serve it beside OpenAI's."""

import json

import httpx2
from anthropic import AsyncAnthropic
from support.clients.openai_api import ALONE
from support.cluster.in_process import Bench

VERSION = {"anthropic-version": "2023-06-01"}


def anthropic_of(running: Bench, api_key: str = "any", max_retries: int = 0, **options: object) -> AsyncAnthropic:
    """The official client, which leaves retries to the test."""
    return AsyncAnthropic(
        base_url=f"http://{running.openai_address}",
        api_key=api_key,
        max_retries=max_retries,
        timeout=30,
        default_headers=ALONE,
        **options,  # type: ignore[arg-type]
    )


async def post_message(running: Bench, body: object, path: str = "/v1/messages", **headers: str) -> httpx2.Response:
    """A body of the test's choice: bytes as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx2.AsyncClient(trust_env=False, timeout=30) as http:
        url = f"http://{running.openai_address}{path}"
        return await http.post(url, content=content, headers={**VERSION, **headers})
