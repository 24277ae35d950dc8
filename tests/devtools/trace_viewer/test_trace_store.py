"""Which traces the store keeps, and which it drops."""

from support.servers.otlp import Made, resource_spans

from devtools.trace_viewer.store import Bounds, Operation, Trace, TraceStore


def filled(*made: Made, bounds: Bounds | None = None) -> TraceStore:
    store = TraceStore(bounds)
    for each in made:
        store.add(resource_spans(each))
    return store


def numbers(traces: list[Trace]) -> list[int]:
    return [int.from_bytes(trace.trace_id, "big") for trace in traces]


def test_spans_of_a_trace_are_found_by_its_id_in_the_order_of_their_start() -> None:
    store = filled(Made(1, 2, parent=1, start=5), Made(1, 1), Made(2, 1))
    trace = store.find((1).to_bytes(16, "big"))
    assert trace is not None
    assert [int.from_bytes(span.span_id, "big") for _, span in trace.spans()] == [1, 2]


def test_the_newest_trace_is_first_whenever_it_came() -> None:
    store = filled(Made(1, 1, start=10), Made(2, 1, start=30), Made(3, 1, start=20))
    assert numbers(list(store.newest_first())) == [2, 3, 1]


def test_the_oldest_trace_makes_room_for_another() -> None:
    store = filled(*(Made(n, 1, start=n) for n in range(1, 6)), bounds=Bounds(max_traces=3))
    assert numbers(list(store.newest_first())) == [5, 4, 3]


def test_bytes_are_bounded_whatever_the_number_of_traces() -> None:
    bounds = Bounds(max_bytes=100_000)
    large = [Made(n, 1, start=n, attributes={"text": "x" * 20_000}) for n in range(1, 20)]
    store = filled(*large, bounds=bounds)
    assert store.num_bytes <= bounds.max_bytes
    assert numbers(list(store.newest_first())) == [19, 18, 17, 16]


def test_a_trace_larger_than_the_bound_leaves_nothing_and_no_other_is_dropped() -> None:
    store = filled(Made(1, 1, attributes={"text": "x" * 200_000}), Made(2, 1), bounds=Bounds(max_bytes=100_000))
    assert numbers(list(store.newest_first())) == [2]


def test_a_trace_without_end_is_cut_and_says_how_much_is_missing() -> None:
    store = filled(*(Made(1, n) for n in range(1, 11)), bounds=Bounds(max_spans_per_trace=4))
    (trace,) = store.newest_first()
    assert (len(trace.records), trace.dropped) == (4, 6)


def test_a_span_that_was_sent_again_is_one_span() -> None:
    (trace,) = filled(Made(1, 1), Made(1, 1)).newest_first()
    assert len(trace.spans()) == 1


def test_services_and_their_operations_are_listed_by_name() -> None:
    store = filled(Made(1, 1, name="b"), Made(1, 2, name="a"), Made(1, 3, service="decode"))
    assert store.services == ["decode", "router"]
    assert store.operations("router") == [Operation("a", 1), Operation("b", 1)]


def test_a_process_that_does_not_say_its_name_is_unknown() -> None:
    assert filled(Made(1, 1, service="")).services == ["unknown_service"]
