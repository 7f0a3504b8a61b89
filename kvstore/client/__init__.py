"""The client library: open a namespace, match, fetch, put. Needs only grpcio, protobuf, numpy and xxhash."""

from kvstore.client import fork as _fork  # isort: skip  (before anything imports gRPC)
from kvstore.client.client import Client
from kvstore.client.limits import ClientLimits, TlsFiles, Transport
from kvstore.client.namespace import OpenNamespace
from kvstore.client.results import Fetched, Match, Put, Reservation
from kvstore.client.ticket import Ticket

__all__ = [
    "Client",
    "ClientLimits",
    "Fetched",
    "Match",
    "OpenNamespace",
    "Put",
    "Reservation",
    "Ticket",
    "TlsFiles",
    "Transport",
]

del _fork
