"""The client library. Needs only grpcio, protobuf, numpy and xxhash.

    with Client() as client:
        ns = client.open(Namespace(model=..., weights=..., layout=layout, block_tokens=128))
        keys = ns.hashes(token_ids)
        there = ns.get(keys, kv)      # kv: uint8 [blocks, bytes_max]; fills the first there.blocks rows
        ...compute the rest...
        ns.put(ns.root, keys, kv)

A miss is a value with a reason, also when no daemon runs: the store never fails a request.
"""

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
