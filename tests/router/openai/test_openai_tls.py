"""OpenAI's API over TLS: the official client, and one that does not trust the certificate."""

import ssl
from pathlib import Path

import httpx2
import openai
import pytest
from support.certificates import Authority
from support.clients.openai_api import ALONE, OPENAI_ROUTER, openai_bench
from support.cluster.in_process import simulated

from router.config import OpenAIConfig
from rpc.auth.tls import TlsConfig


@pytest.mark.feature("TLS", engine="simulated", facade="openai")
async def test_the_official_client_speaks_tls_and_others_are_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    pair = authority.issue("router", "localhost")
    tls = OpenAIConfig(listen="127.0.0.1:0", tls=TlsConfig(cert=pair.cert, key=pair.key))
    router = OPENAI_ROUTER.model_copy(update={"openai": tls})
    async with openai_bench(simulated("w1", "prefill", "decode"), router=router) as running:
        for trusted in (True, False):
            http = httpx2.AsyncClient(
                verify=ssl.create_default_context(cafile=authority.ca) if trusted else True, trust_env=False
            )
            url = f"https://{running.openai_address}/v1"
            client = openai.AsyncOpenAI(
                base_url=url, api_key="any", max_retries=0, http_client=http, default_headers=ALONE
            )
            if trusted:
                stream = await client.completions.create(model="demo", prompt="x", max_tokens=5, stream=True)
                assert len("".join([chunk.choices[0].text async for chunk in stream])) == 5
            else:
                with pytest.raises(openai.APIConnectionError):
                    await client.completions.create(model="demo", prompt="x", max_tokens=5)
            await client.close()
        async with httpx2.AsyncClient(trust_env=False) as plain:
            with pytest.raises(httpx2.HTTPError):
                await plain.get(f"http://{running.openai_address}/v1/models")
