"""What a connection on a plain socket says first."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from kvstore.errors import InvalidArgument
from kvstore.rpc.channel import PROTOCOL
from kvstore.rpc.packets import Header, Kind, packet
from kvstore.rpc.v1 import data_pb2 as pb


def greeting_in(header: Header, body: bytes) -> pb.Greeting:
    """Return the greeting in a packet.

    Errors: InvalidArgument.
    """
    if header.kind is not Kind.GREETING:
        raise InvalidArgument(f"greeting: a connection begins with one, got {header.kind.name}")
    try:
        greeting = pb.Greeting.FromString(body)
    except DecodeError as error:
        raise InvalidArgument(f"greeting: {len(body)} bytes that are no greeting") from error
    if greeting.protocol != PROTOCOL:
        raise InvalidArgument(f"greeting: this daemon speaks protocol {PROTOCOL}, got {greeting.protocol}")
    return greeting


def greeting_back(purpose: pb.Purpose) -> bytes:
    """Return the packet that greets back."""
    greeting = pb.Greeting(protocol=PROTOCOL, purpose=purpose)
    return packet(Kind.GREETING, greeting.SerializeToString())
