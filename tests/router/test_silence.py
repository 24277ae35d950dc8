"""The silence that a peer may keep: connections bear what probes find."""

from baton.connection.settings import KEEPALIVE_OPTIONS
from baton_http2.limits import Http2Limits, ServerLimits
from router.config import RouterConfig


def test_a_hung_worker_is_found_by_probes_well_before_its_connections_are_given_up() -> None:
    assert 2 * RouterConfig().probe.hung_seconds <= ServerLimits(Http2Limits()).keepalive_timeout_seconds


def test_grpcs_channels_and_our_own_server_wait_as_long_for_a_ping() -> None:
    options, own = dict(KEEPALIVE_OPTIONS), ServerLimits(Http2Limits())
    assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"]
    assert options["grpc.keepalive_timeout_ms"] == own.keepalive_timeout_seconds * 1000
    assert options["grpc.keepalive_time_ms"] == own.keepalive_seconds * 1000
