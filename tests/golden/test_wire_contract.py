"""Protocol 1 as it was recorded: old clients and new daemons, and the reverse, understand one another.

What fails here breaks clients that are in engines already: a change needs a new field, or a new protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.client.fallback import miss_reason
from kvstore.errors import InvalidArgument, KVStoreError
from kvstore.rpc import wire
from kvstore.rpc.channel import PROTOCOL
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import MissReason
from tests.golden import wire_messages as golden
from tests.unit.service.test_session import Stream, World, played

MESSAGES = golden.messages()
# A field that no message has: number 3000, one varint and one of bytes.
UNKNOWN = b"\xc0\xbb\x01\x2a" + b"\xc2\xbb\x01\x03new"
READ: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "request_open": (lambda m: wire.open_from_wire(m.open), golden.NAMESPACE),
    "request_match": (lambda m: wire.match_from_wire(m.match), golden.MATCH),
    "request_release": (lambda m: wire.release_from_wire(m.release), golden.RELEASE),
    "request_reserve": (lambda m: wire.reserve_from_wire(m.reserve), golden.RESERVE),
    "request_commit": (lambda m: wire.commit_from_wire(m.commit), golden.COMMIT),
    "reply_match": (lambda m: wire.match_answer_from_wire(m.match, golden.LAYOUT), golden.MATCHED),
    "reply_prefetch": (lambda m: wire.prefetch_answer_from_wire(m.prefetch), golden.PREFETCHED),
    "reply_list": (lambda m: wire.list_answer_from_wire(m.list), golden.LISTED),
    "reply_reserve": (lambda m: wire.reserve_answer_from_wire(m.reserve, golden.LAYOUT), golden.RESERVED),
    "reply_commit": (lambda m: wire.commit_answer_from_wire(m.commit), golden.STORED),
    "reply_progress": (lambda m: wire.progress_from_wire(m.progress, golden.LAYOUT), golden.PROGRESS),
    "put_reply": (lambda m: wire.commit_answer_from_wire(m), golden.STORED),
}


def test_every_verb_and_answer_is_recorded() -> None:
    assert {path.stem for path in golden.FOLDER.iterdir()} == MESSAGES.keys()
    verbs = {field.name for field in pb.SessionRequest.DESCRIPTOR.oneofs_by_name["verb"].fields}
    answers = {field.name for field in pb.SessionReply.DESCRIPTOR.oneofs_by_name["answer"].fields}
    assert golden.requests().keys() == verbs
    assert golden.replies().keys() == answers


@pytest.mark.parametrize("name", MESSAGES)
def test_this_build_writes_what_was_recorded(name: str) -> None:
    assert MESSAGES[name].SerializeToString(deterministic=True) == golden.recorded(name)


@pytest.mark.parametrize("name", MESSAGES)
def test_this_build_reads_what_was_recorded(name: str) -> None:
    read = type(MESSAGES[name]).FromString(golden.recorded(name))
    assert read == MESSAGES[name]


@pytest.mark.parametrize("name", READ)
def test_values_come_back_also_with_fields_of_a_later_build(name: str) -> None:
    decode, value = READ[name]
    kind = type(MESSAGES[name])
    for data in (golden.recorded(name), golden.recorded(name) + UNKNOWN, deeply_extended(name)):
        assert repr(decode(kind.FromString(data))) == repr(value)


def deeply_extended(name: str) -> bytes:
    """Return a recorded message whose inner messages have unknown fields as well."""
    message = type(MESSAGES[name]).FromString(golden.recorded(name))
    for _, inner in message.ListFields():
        if hasattr(inner, "MergeFromString"):
            inner.MergeFromString(UNKNOWN)
    data: bytes = message.SerializeToString()
    return data


def test_a_recorded_client_is_served() -> None:
    """Every verb of an old client gets the answer of its kind, or an error that names a reason."""
    world = World()

    async def play(stream: Stream) -> None:
        for verb in golden.requests():
            request = pb.SessionRequest.FromString(golden.recorded(f"request_{verb}") + UNKNOWN)
            stream.requests.put_nowait(request)
            reply = await stream.hear()
            assert reply.request_id == request.request_id
            kind = reply.WhichOneof("answer")
            assert kind in (verb, "error"), verb
            assert reply.error.code != pb.ERROR_CODE_INTERNAL, reply

    played(world, play)


def test_a_verb_of_a_later_client_is_refused_and_the_session_goes_on() -> None:
    world = World()

    async def play(stream: Stream) -> None:
        await stream.greet()
        later = pb.SessionRequest.FromString(pb.SessionRequest(request_id=9).SerializeToString() + UNKNOWN)
        stream.requests.put_nowait(later)
        refused = await stream.hear()
        assert refused.error.code == pb.ERROR_CODE_INVALID_ARGUMENT
        assert "does not know" in refused.error.message
        assert (await stream.ask(10, ping=pb.PingRequest())).WhichOneof("answer") == "ping"

    played(world, play)


def test_another_protocol_is_refused_with_both_numbers() -> None:
    world = World()

    async def play(stream: Stream) -> None:
        refused = await stream.ask(1, hello=pb.HelloRequest(protocol=PROTOCOL + 1, client="later"))
        assert refused.error.code == pb.ERROR_CODE_INVALID_ARGUMENT
        assert f"protocol {PROTOCOL}" in refused.error.message
        assert str(PROTOCOL + 1) in refused.error.message

    played(world, play)


def in_match(**fields: Any) -> pb.SessionRequest:
    request = pb.SessionRequest.FromString(golden.recorded("request_match"))
    request.match.MergeFrom(pb.MatchRequest(**fields))
    return request


@pytest.mark.parametrize(
    "request_",
    [
        in_match(mode=99),
        pb.SessionRequest(commit=pb.CommitRequest(reservation=5, blocks=1, ack=99)),  # type: ignore[arg-type]
        pb.SessionRequest(release=pb.ReleaseRequest(lease=1, outcome=99)),  # type: ignore[arg-type]
    ],
    ids=["mode", "ack", "outcome"],
)
def test_a_value_of_a_later_client_is_refused_by_name(request_: pb.SessionRequest) -> None:
    world = World()
    request_.request_id = 7

    async def play(stream: Stream) -> None:
        await stream.greet()
        stream.requests.put_nowait(request_)
        refused = await asyncio.wait_for(stream.hear(), 10)
        assert refused.error.code == pb.ERROR_CODE_INVALID_ARGUMENT
        assert "99" in refused.error.message

    played(world, play)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("reply_match", lambda m: setattr(m.match, "reason", 99)),
        ("reply_match", lambda m: m.match.tiers.add(tier=99, count=1)),
        ("reply_prefetch", lambda m: setattr(m.prefetch, "reason", 99)),
        ("reply_reserve", lambda m: m.reserve.outcomes.add(outcome=99, count=1)),
        ("reply_commit", lambda m: m.commit.outcomes.add(outcome=99, count=1)),
        ("reply_progress", lambda m: setattr(m.progress, "reason", 99)),
    ],
)
def test_a_value_of_a_later_daemon_is_refused_and_never_guessed(
    name: str, spoil: Callable[[Any], None]
) -> None:
    message = pb.SessionReply.FromString(golden.recorded(name))
    spoil(message)
    with pytest.raises(InvalidArgument, match="99"):
        READ[name][0](message)


def test_an_error_of_a_later_daemon_is_a_miss() -> None:
    error = wire.error_from_wire(pb.Error(code=99, message="something new"))  # type: ignore[arg-type]
    assert type(error) is KVStoreError
    assert miss_reason(error) is MissReason.TIER_DOWN
