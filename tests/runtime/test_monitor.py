"""The HTTP server of a process: metrics and health."""

import asyncio
import socket
import threading
import time
from contextlib import ExitStack
from importlib.metadata import version

import pytest
from prometheus_client import Counter
from support.clients.scraping import get_health, scrape
from support.eventually import eventually

from baton.errors import ConfigError
from runtime.telemetry.metrics import REGISTRY
from runtime.telemetry.monitor import serve_monitor


def test_metrics_are_served_where_they_are_asked_for() -> None:
    counter = Counter("baton_test_things", "Things of this test.", registry=REGISTRY)
    counter.inc(3)
    with serve_monitor("127.0.0.1:0") as monitor:
        scraped = scrape(f"127.0.0.1:{monitor.port}")
    REGISTRY.unregister(counter)
    assert scraped.sum("baton_test_things_total") == 3
    assert scraped.has("baton_build_info", version=version("baton-serving"))


def test_what_libraries_count_in_their_registry_is_not_served() -> None:
    Counter("some_library_things", "Things of a library.").inc()
    with serve_monitor("127.0.0.1:0") as monitor:
        scraped = scrape(f"127.0.0.1:{monitor.port}")
    assert not scraped.has("some_library_things_total")


def test_every_process_tells_what_it_uses() -> None:
    with serve_monitor("127.0.0.1:0") as monitor:
        scraped = scrape(f"127.0.0.1:{monitor.port}")
    assert scraped.sum("process_resident_memory_bytes") > 10e6
    assert scraped.sum("process_cpu_seconds_total") > 0


def test_metrics_stop_with_their_context() -> None:
    with serve_monitor("127.0.0.1:0") as monitor:
        pass
    with serve_monitor(f"127.0.0.1:{monitor.port}") as again:
        assert again.port == monitor.port


def test_an_empty_address_serves_no_metrics() -> None:
    with serve_monitor("") as monitor:
        assert monitor.port == 0


def test_a_taken_port_of_metrics_is_a_config_error() -> None:
    with serve_monitor("127.0.0.1:0") as monitor:
        again = serve_monitor(f"127.0.0.1:{monitor.port}")
        with pytest.raises(ConfigError, match=f"metrics_listen.*{monitor.port}"):
            again.__enter__()


@pytest.mark.parametrize("listen", ["localhost", "127.0.0.1:http", "127.0.0.1:99999"])
def test_an_address_of_metrics_that_is_none_is_a_config_error(listen: str) -> None:
    with pytest.raises(ConfigError, match=f"metrics_listen.*{listen}"), serve_monitor(listen):
        pass


def test_a_process_that_is_still_starting_does_not_serve() -> None:
    with serve_monitor("127.0.0.1:0") as monitor:
        assert get_health(f"127.0.0.1:{monitor.port}") == (
            503,
            {"status": "NOT_SERVING", "problem": "the process is starting"},
        )


async def test_health_is_what_its_owner_says_now() -> None:
    with serve_monitor("127.0.0.1:0") as monitor:
        said = {"status": "SERVING", "roles": ["decode"]}
        monitor.answer_with(lambda: said)
        assert await asyncio.to_thread(get_health, f"127.0.0.1:{monitor.port}") == (200, said)
        said["status"] = "NOT_SERVING"
        assert await asyncio.to_thread(get_health, f"127.0.0.1:{monitor.port}") == (503, said)


async def test_a_process_whose_event_loop_stands_still_does_not_serve() -> None:
    with serve_monitor("127.0.0.1:0") as monitor:
        monitor.answer_with(lambda: {"status": "SERVING"})
        asking = asyncio.ensure_future(asyncio.to_thread(get_health, f"127.0.0.1:{monitor.port}"))
        await asyncio.sleep(0)
        time.sleep(4)  # noqa: ASYNC251
        code, report = await asking
    assert code == 503
    assert report["problem"] == "the event loop has not answered for 2 s"


def test_a_process_that_has_ended_does_not_serve() -> None:
    with serve_monitor("127.0.0.1:0") as monitor:

        async def serve() -> None:
            monitor.answer_with(lambda: {"status": "SERVING"})

        asyncio.run(serve())
        assert get_health(f"127.0.0.1:{monitor.port}") == (
            503,
            {"status": "NOT_SERVING", "problem": "the process has ended"},
        )


async def test_idle_connections_take_few_threads_and_keep_nobody_out() -> None:
    before = threading.active_count()
    with serve_monitor("127.0.0.1:0") as monitor, ExitStack() as stack:
        monitor.answer_with(lambda: {"status": "SERVING"})
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", monitor.port), timeout=10))
        code, _ = await asyncio.to_thread(get_health, f"127.0.0.1:{monitor.port}")
        assert code == 200
        await eventually(lambda: threading.active_count() - before < 100)
