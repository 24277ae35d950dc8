"""Reports of a worker that are lost: one warning, and a metric until they are back or the worker has left."""

from structlog.testing import capture_logs
from support.clients.scraping import sample
from support.cluster.in_process import DECODE, PREFILL, bench
from support.eventually import eventually

LOST = "baton_router_lost_report_streams"


def lost(reports: str) -> float:
    return sample(LOST, reports=reports)


async def test_reports_that_are_lost_are_counted_until_they_are_back_and_warned_of_once() -> None:
    async with bench(PREFILL, DECODE) as running:
        await eventually(lambda: lost("load") == 0)
        with capture_logs() as lines:
            await running.proxies["p1"].cut()
            await eventually(lambda: lost("load") == 1)
            await running.proxies["p1"].restore()
            await eventually(lambda: lost("load") == 0)
        told = [line for line in lines if line.get("reports") == "load"]
        assert [(line["log_level"], line["worker_id"]) for line in told] == [("warning", "p1"), ("info", "p1")]
        assert told[0]["reason"]


async def test_a_worker_that_has_left_is_not_counted() -> None:
    async with bench(PREFILL, DECODE) as running:
        await running.proxies["p1"].cut()
        await eventually(lambda: lost("load") == 1)
        await running.stop("p1")
        await eventually(lambda: lost("load") == 0)
