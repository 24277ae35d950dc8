"""The metrics that every process has."""

import mmap
import socket
import time

import psutil
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.exposition import generate_latest
from support.clients.scraping import sample, since
from support.eventually import eventually

from baton.errors import Cancelled, DeadlineExceeded, EngineFailed, InvalidRequest, NoWorker, Overloaded, QuotaExceeded
from rpc.status import OK, outcome_of
from runtime.telemetry.frequent_metrics import FrequentCounter, FrequentHistogram
from runtime.telemetry.metrics import watched_event_loop

BUCKETS = (0.01, 0.1, 1.0)


async def test_an_event_loop_that_is_held_up_has_lagged() -> None:
    count = since("baton_event_loop_lag_seconds_count")
    slow = since("baton_event_loop_lag_seconds_sum")
    async with watched_event_loop():
        await eventually(lambda: count.grown >= 1)
        before = slow.grown
        time.sleep(0.6)  # noqa: ASYNC251 - as whatever blocks a loop does
        await eventually(lambda: slow.grown - before > 0.3)


def test_bytes_between_two_sockets_are_those_of_the_loopback() -> None:
    received = since("baton_network_receive_bytes_total", device="lo")
    sent = since("baton_network_transmit_bytes_total", device="lo")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"x" * 50_000)
            assert len(accepted.recv(50_000, socket.MSG_WAITALL)) == 50_000
    assert received.grown >= 50_000
    assert sent.grown >= 50_000


def test_the_peak_of_memory_stays_when_memory_is_given_back() -> None:
    before = sample("baton_process_peak_memory_bytes")
    taken = bytearray(int(before - psutil.Process().memory_info().rss) + (64 << 20))
    taken[:: mmap.PAGESIZE] = b"x" * len(taken[:: mmap.PAGESIZE])
    del taken
    assert sample("baton_process_peak_memory_bytes") >= before + (32 << 20)


def test_a_frequent_histogram_is_shown_as_the_librarys_own_is() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    frequent = FrequentHistogram("seconds", "Some.", ["kind"], BUCKETS, ours).labels("a")
    plain = Histogram("seconds", "Some.", ["kind"], buckets=BUCKETS, registry=theirs).labels("a")
    for value in (0.0, 0.01, 0.05, 0.1, 0.2, 1.0, 7.0):
        frequent.observe(value)
        plain.observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_a_frequent_counter_is_shown_as_the_librarys_own_is() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    frequent, plain = (
        FrequentCounter("things_total", "Some.", ["kind"], ours),
        Counter("things_total", "Some.", ["kind"], registry=theirs),
    )
    for counter in (frequent, plain):
        counter.labels("a").inc()
        counter.labels("a").inc(2)
        counter.labels("b")
    assert generate_latest(ours) == generate_latest(theirs)


def test_a_frequent_gauge_is_shown_as_the_librarys_own_is() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    for gauge in (
        FrequentCounter("things", "Some.", (), ours, is_gauge=True).labels(),
        Gauge("things", "Some.", registry=theirs),
    ):
        gauge.inc()
        gauge.inc()
        gauge.dec()
    assert generate_latest(ours) == generate_latest(theirs)


def test_a_value_may_count_several_times() -> None:
    registry = CollectorRegistry()
    FrequentHistogram("seconds", "Some.", [], BUCKETS, registry).labels().observe(0.05, 4)
    assert registry.get_sample_value("seconds_count") == 4
    assert registry.get_sample_value("seconds_bucket", {"le": "0.1"}) == 4
    assert registry.get_sample_value("seconds_bucket", {"le": "0.01"}) == 0
    assert registry.get_sample_value("seconds_sum") == pytest.approx(0.2)


def test_the_same_labels_are_the_same_series() -> None:
    registry = CollectorRegistry()
    histogram = FrequentHistogram("seconds", "Some.", ["kind"], BUCKETS, registry)
    for _ in range(2):
        histogram.labels("a").observe(0.05)
    histogram.labels("b").observe(0.05)
    assert registry.get_sample_value("seconds_count", {"kind": "a"}) == 2


def test_a_frequent_histogram_has_its_name_for_itself() -> None:
    registry = CollectorRegistry(auto_describe=True)
    FrequentHistogram("seconds", "Some.", [], BUCKETS, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Histogram("seconds", "Others.", registry=registry)


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (OK, "ok"),
        (Cancelled.reason, "cancelled"),
        (InvalidRequest.reason, "refused"),
        (Overloaded.reason, "refused"),
        (QuotaExceeded.reason, "refused"),
        (DeadlineExceeded.reason, "failed"),
        (EngineFailed.reason, "failed"),
        (NoWorker.reason, "failed"),
        ("NO_SUCH_REASON", "failed"),
    ],
)
def test_an_outcome_says_whose_fault_it_was(reason: str, outcome: str) -> None:
    assert outcome_of(reason) == outcome
