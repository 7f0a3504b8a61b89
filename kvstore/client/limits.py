"""What a client may be told: how it connects, and its limits. Knows nothing of how they are enforced."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstore.copying import COPY_THREADS
from kvstore.rpc.channel import CHUNK_BYTES_MAX


class Transport(StrEnum):
    """How payload travels. AUTO: mapped where the daemon offers its arena, else framed."""

    AUTO = "auto"
    MAPPED = "mapped"
    FRAMED = "framed"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the authority that signed the daemon; for mutual TLS the client's certificate and key."""

    ca: str
    certificate: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Bounds of one client. Units are in the names.

    `connect_seconds` bounds one attempt to connect, hello and arena mapping included; `open_seconds` an open.
    `worker_threads` serve submitted fetches, gets and puts, most of which wait for loads.
    `plaintext_on_loopback` lets a token travel over TCP to this very machine without TLS.
    """

    connect_seconds: float = 2.0
    open_seconds: float = 5.0
    reconnect_seconds: float = 0.1
    reconnect_seconds_max: float = 2.0
    breaker_failures: int = 3
    breaker_seconds: float = 1.0
    breaker_seconds_max: float = 30.0
    requests_max: int = 1024
    tickets_max: int = 256
    copy_threads: int = COPY_THREADS
    worker_threads: int = 8
    chunk_bytes: int = CHUNK_BYTES_MAX
    plaintext_on_loopback: bool = False
