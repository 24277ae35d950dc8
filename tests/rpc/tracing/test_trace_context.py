"""W3C trace context as text: https://www.w3.org/TR/trace-context/."""

import pytest

from rpc.tracing.propagation import format_traceparent, metadata_of, parse_traceparent, read_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_a_valid_traceparent_survives_both_ways() -> None:
    context = parse_traceparent(VALID)
    assert context is not None
    assert format_traceparent(context) == VALID


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0x",
        f"0x-{TRACE}-{SPAN}-01",
    ],
)
def test_a_traceparent_that_is_not_valid_is_none(traceparent: str) -> None:
    assert parse_traceparent(traceparent) is None


def test_a_later_version_may_have_more_fields() -> None:
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-01-more") is not None


def test_two_parents_are_none() -> None:
    assert read_context([("traceparent", VALID), ("traceparent", VALID)]) is None


def test_the_state_of_other_vendors_is_passed_on_in_its_order() -> None:
    context = read_context([("traceparent", VALID), ("tracestate", "a=1,b=2"), ("tracestate", "c=3")])
    assert context is not None
    assert dict(metadata_of(context)) == {"traceparent": VALID, "tracestate": "a=1,b=2,c=3"}


@pytest.mark.parametrize("state", ["", "no equals sign", "a=1," * 200])
def test_a_state_that_is_not_valid_is_left_out_and_the_trace_goes_on(state: str) -> None:
    context = read_context([("traceparent", VALID), ("tracestate", state)])
    assert context is not None
    assert metadata_of(context) == (("traceparent", VALID),)
