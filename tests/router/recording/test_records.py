"""Records of requests: what they say, who gets them, and what they take."""

from support.cluster.in_process import DECODE, FAST_ROUTER, PREFILL, bench

from baton import AsyncClient
from router.config import RecordsConfig

ASKED = FAST_ROUTER.model_copy(update={"records": RecordsConfig(asked=True)})


async def test_x() -> None:
    async with bench(PREFILL, DECODE, router=ASKED) as running, AsyncClient(running.address) as client:
        async with client.generate("hello there", max_tokens=40, record=True, seed=3) as answer:
            await answer.text()
        [record] = await client.records(answer.request_id)
        print(record, record.ByteSize())
