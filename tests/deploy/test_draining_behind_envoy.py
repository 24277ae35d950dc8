"""A router that shuts down while streams run through Envoy: clients notice nothing."""

import asyncio
from pathlib import Path

from support.clients.generation import generate_all, greedy_text
from support.cluster.behind_envoy import open_edge
from support.eventually import PATIENCE_SECONDS, eventually

from runtime.aio import timeout


async def test_no_stream_is_lost_while_a_router_is_drained(tmp_path: Path) -> None:
    requests = [greedy_text(f"number {i}", 20) for i in range(120)]
    async with open_edge(tmp_path) as edge:
        streams = asyncio.ensure_future(generate_all(edge.stub, requests, at_once=40))
        await eventually(lambda: any(worker.load.running > 8 for worker in edge.routers[0].cluster.workers))
        await edge.first.aclose()
        answers = await streams
        assert {len(answer.ids) for answer in answers} == {20}
        # The answers may all be there before Envoy's next check of the router that has left.
        async with timeout(PATIENCE_SECONDS):
            while await edge.envoy.healthy_routers() != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
