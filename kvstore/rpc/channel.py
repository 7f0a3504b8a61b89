"""What both ends of the wire agree on besides the messages: limits, channel options and metadata keys."""

from __future__ import annotations

PROTOCOL = 1
"""Sent in both hellos; a daemon serves this one and the one before it."""
MESSAGE_BYTES_MAX = 64 << 20
"""Largest message: a match of 65,536 blocks answers with about 10 MiB."""
CHUNK_BYTES_MAX = 1 << 20
"""Largest payload piece of the framed streams."""
AUTHORIZATION = "authorization"
"""Metadata key of the bearer token."""
ERROR_METADATA = "kvstore-error-bin"
"""Trailing metadata key that carries the serialized Error of a failed call."""

_SIZES = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)

# Retries are the client's own, counted and bounded; what gRPC would retry by itself is switched off.
# A hung peer on TCP is found by keepalive; on a unix socket deadlines do that.
CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SIZES,
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also how long an attempt may take: a daemon under load needs more than a moment to greet.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SIZES,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that carries a token, nothing for no token."""
    return ((AUTHORIZATION, f"Bearer {token}"),) if token else ()
