"""Traces and metrics of requests by HTTP: those of any request, below the caller's span."""

import httpx2
import pytest
from support.clients.openai_api import client_of
from support.clients.scraping import since
from support.cluster.in_process import DECODE, PREFILL, Bench
from support.cluster.traced import Traced, traced
from support.eventually import eventually

from devtools.trace_viewer import reading
from devtools.trace_viewer.reading import ReadTrace, read
from router.config import OpenAIConfig

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVED = "/v1/completions"


def traces_of(cluster: Traced) -> list[ReadTrace]:
    return [read(reading.trace(trace)) for trace in cluster.viewer.store.newest_first()]


@pytest.mark.feature("traces and metrics", engine="simulated", facade="openai")
async def test_a_request_is_in_the_trace_that_its_header_names_and_counted() -> None:
    labels = {"model": "demo", "request_class": "short", "outcome": "ok", "reason": "LENGTH"}
    counted = since("baton_router_requests_total", **labels)
    async with traced(PREFILL, DECODE, openai=OpenAIConfig(listen="127.0.0.1:0")) as cluster:
        headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
        await client_of(cluster.running).completions.create(
            model="demo", prompt="hello", max_tokens=4, extra_headers=headers
        )
        # The span of the call ends last, and so is exported last.
        await eventually(lambda: any(SERVED in span.name for trace in traces_of(cluster) for span in trace.spans))
        trace = cluster.trace()
    assert trace.trace_id == TRACE_ID
    (served,) = [span for span in trace.spans if SERVED in span.name]
    assert (served.parent_id, served.attributes["http.response.status_code"]) == (SPAN_ID, 200)
    assert [span.name for span in trace.below(served)] == ["baton.generate"]
    assert counted.grown == 1


STREAMED = {
    "/v1/completions": {"prompt": "x", "max_tokens": 4, "stream": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True},
    "/v1/responses": {"input": "x", "max_output_tokens": 4, "stream": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True},
}


@pytest.mark.parametrize("path", STREAMED)
async def test_a_stream_that_was_read_to_its_end_is_not_counted_as_cancelled(served: Bench, path: str) -> None:
    labels = {"model": "demo", "request_class": "short"}
    answered = since("baton_router_requests_total", **labels, outcome="ok", reason="LENGTH")
    cancelled = since("baton_router_requests_total", **labels, outcome="cancelled", reason="CANCELLED")
    async with httpx2.AsyncClient(trust_env=False, base_url=f"http://{served.openai_address}") as http:
        for _ in range(5):
            assert (await http.post(path, json={"model": "demo", **STREAMED[path]})).status_code == 200
    await eventually(lambda: answered.grown + cancelled.grown == 5)
    assert cancelled.grown == 0
