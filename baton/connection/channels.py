"""The options of gRPC channels that clients and processes share."""

# Larger than any limit of a router, so that its limits answer first, with an error that names the field.
MAX_RECEIVE_BYTES = 64 * 1024 * 1024

# A peer that is silent for 10 s gets a ping, and its connection ends if the ping is not answered within 10 s: our own
# server answers on its event loop, which may be held for seconds. Probes find a hung worker sooner. Without
# http2.ping_timeout_ms another timeout applies, of a minute. gRPC ignores unknown keys: tests hold these.
KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *KEEPALIVE_OPTIONS,
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    # A peer that comes back is found within seconds; by default up to two minutes pass between attempts.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    # Peers are reached directly, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
)
