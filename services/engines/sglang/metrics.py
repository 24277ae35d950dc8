"""The adapter's metrics, and SGLang's own, `sglang:*`, at the same endpoint."""

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from runtime.telemetry.metrics import counter, gauge
from services.engines.external.families import PackageFamilies

ROOMS = gauge(
    "baton_sglang_rooms_open", "Prompts for which SGLang has allocated blocks, and whose KV has not come yet."
)
CLOSED_ROOMS = counter("baton_sglang_rooms_closed_total", "Rooms that were closed before their KV had come.")
ABORTS = counter("baton_sglang_aborts_total", "Requests that were aborted inside SGLang.")
UNANSWERED_ABORTS = counter(
    "baton_sglang_unanswered_aborts_total", "Aborts that SGLang did not handle within abort_seconds."
)
STALLED_READERS = counter("baton_sglang_stalled_readers_total", "Requests aborted because their answer was not read.")
KV_EVENT_GAPS = counter("baton_sglang_kv_event_gaps_total", "Times that KV events were lost.")


def sglang_families(folder: str) -> PackageFamilies:
    """The families of SGLang's processes, which write them into files of `folder`, and those of this one."""
    written = CollectorRegistry()
    MultiProcessCollector(written, path=folder)  # type: ignore[no-untyped-call]
    return PackageFamilies("sglang:", written)
