"""The small parts of the client: breaker, tickets, alarms, addresses, outcomes, buffers."""

from __future__ import annotations

import select
import threading

import numpy as np
import pytest

from kvstore.api import OutcomeRun, PartBlocks
from kvstore.client import Client, ClientLimits, Ticket, TlsFiles, Transport
from kvstore.client.alarms import Alarms
from kvstore.client.breaker import Breaker
from kvstore.client.buffers import by_part, chunks_of, pieces_of, sources_of
from kvstore.client.delivery import Delivery
from kvstore.client.results import final_outcomes
from kvstore.clock import ManualClock, SystemClock
from kvstore.errors import DeadlineExceeded, InvalidArgument
from kvstore.layout import CacheGroup, Layout, Part, Segment
from kvstore.types import GroupKind, MissReason, PutOutcome
from tests.unit.client.conftest import LAYOUT, SECONDS

TWO = Layout(
    "bf16",
    (CacheGroup("kv"), CacheGroup("swa", GroupKind.CHECKPOINT)),
    (
        Part(0, "kv", "all", 10, (Segment(0, 1, 0, 6), Segment(1, 1, 6, 4))),
        Part(1, "swa", "all", 4, (Segment(0, 1, 0, 4),)),
    ),
).checked()


def breaker(clock: ManualClock) -> Breaker:
    return Breaker(clock, failures=3, seconds=1.0, seconds_max=4.0)


def test_the_breaker_opens_after_failures_in_a_row_only() -> None:
    it = breaker(ManualClock())
    for _ in range(2):
        it.fail()
    it.succeed()
    for _ in range(2):
        it.fail()
    assert it.admit()
    it.fail()
    assert it.is_open
    assert not it.admit()


def test_the_breaker_lets_one_probe_through_and_doubles_its_pause() -> None:
    clock = ManualClock()
    it = breaker(clock)
    for _ in range(3):
        it.fail()
    for pause in (1.0, 2.0, 4.0, 4.0):
        clock.advance(pause - 0.01)
        assert not it.admit()
        clock.advance(0.01)
        assert it.admit()
        assert not it.admit(), "one probe is enough"
        it.fail()
    clock.advance(4.0)
    assert it.admit()
    it.succeed()
    assert not it.is_open
    for _ in range(3):
        it.fail()
    clock.advance(1.0)
    assert it.admit(), "after a success the pause starts small again"


def test_stragglers_do_not_lengthen_the_pause() -> None:
    clock = ManualClock()
    it = breaker(clock)
    for _ in range(20):
        it.fail()
    clock.advance(1.0)
    assert it.admit()


def test_a_probe_that_never_reports_does_not_close_the_door() -> None:
    clock = ManualClock()
    it = breaker(clock)
    for _ in range(3):
        it.fail()
    clock.advance(1.0)
    assert it.admit()
    clock.advance(1.0)
    assert it.admit()


def test_the_first_result_of_a_ticket_wins() -> None:
    ticket: Ticket[int] = Ticket()
    assert not select.select([ticket.fileno()], [], [], 0)[0]
    assert ticket.resolve(1)
    assert not ticket.resolve(2)
    assert not ticket.fail(ValueError())
    assert ticket.result() == 1
    assert select.select([ticket.fileno()], [], [], 0)[0]


def test_a_ticket_hands_an_error_on() -> None:
    ticket: Ticket[int] = Ticket()
    with pytest.raises(DeadlineExceeded):
        ticket.result(0)
    ticket.run(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ticket.result()


def test_alarms_ring_in_order_and_close_rings_the_rest() -> None:
    alarms = Alarms(SystemClock())
    rung: list[str] = []
    first = threading.Event()
    alarms.set(3600.0, lambda: rung.append("last"))
    alarms.set(0.0, lambda: rung.remove("nothing"))  # an alarm that fails hurts no other
    alarms.set(0.0, lambda: rung.append("first"))
    alarms.set(0.0, first.set)
    assert first.wait(SECONDS)
    assert rung == ["first"]
    alarms.close()
    assert rung == ["first", "last"]


@pytest.mark.parametrize(
    ("address", "arguments", "text"),
    [
        ("nonsense", {}, "expected unix:/path or host:port"),
        ("host:99999", {}, "expected unix:/path or host:port"),
        ("host:1", {"token": "t"}, "over TCP with TLS only"),
        ("127.0.0.1:1", {"token": "t"}, "over TCP with TLS only"),
        ("10.0.0.1:1", {"token": "t", "limits": ClientLimits(plaintext_on_loopback=True)}, "with TLS only"),
        ("unix:/x", {"tls": TlsFiles("ca")}, "takes no TLS files"),
        ("host:1", {"transport": Transport.MAPPED}, "over unix sockets only"),
    ],
)
def test_an_address_that_cannot_be_is_refused(address: str, arguments: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Client(address, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "localhost:1"])
def test_a_token_in_the_clear_needs_loopback_and_a_word(address: str) -> None:
    client = Client(address, token="secret", limits=ClientLimits(plaintext_on_loopback=True))
    assert "secret" not in repr(client._target)


def test_a_tls_file_that_is_missing_is_named() -> None:
    client = Client("localhost:1", token="t", tls=TlsFiles("/nowhere/ca.pem"))
    with pytest.raises(InvalidArgument, match=r"tls file /nowhere/ca\.pem: cannot be read: No such file"):
        client.ping(SECONDS)
    client.close()


STORED, DUPLICATE, RESERVED = PutOutcome.STORED_HOST, PutOutcome.DUPLICATE, PutOutcome.RESERVED


@pytest.mark.parametrize(
    ("reserved", "committed", "final"),
    [
        ([(RESERVED, 3)], [(STORED, 3)], [(STORED, 3)]),
        ([(DUPLICATE, 1), (RESERVED, 2)], [(STORED, 2)], [(DUPLICATE, 1), (STORED, 2)]),
        ([(DUPLICATE, 1), (RESERVED, 2)], [(DUPLICATE, 2), (STORED, 1)], [(DUPLICATE, 2), (STORED, 1)]),
        (
            [(RESERVED, 1), (DUPLICATE, 1), (RESERVED, 1)],
            [(STORED, 2)],
            [(STORED, 1), (DUPLICATE, 1), (STORED, 1)],
        ),
        ([(RESERVED, 3)], [(STORED, 1)], [(STORED, 1), (RESERVED, 2)]),
    ],
)
def test_a_commit_speaks_of_all_blocks_or_of_the_reserved_ones(
    reserved: list[tuple[PutOutcome, int]],
    committed: list[tuple[PutOutcome, int]],
    final: list[tuple[PutOutcome, int]],
) -> None:
    def runs(pairs: list[tuple[PutOutcome, int]]) -> list[OutcomeRun]:
        return [OutcomeRun(*pair) for pair in pairs]

    assert final_outcomes(runs(reserved), runs(committed)) == tuple(runs(final))


def test_pieces_of_a_short_record_end_early() -> None:
    buffer = np.arange(20, dtype=np.uint8).reshape(2, 10)
    assert [v.tolist() for v in pieces_of(buffer, 1, 7)] == [[10, 11, 12, 13, 14, 15, 16]]
    columns = [buffer[:, :6], buffer[:, 6:9], buffer[:, 9:]]
    assert [v.tolist() for v in pieces_of(columns, 1, 7)] == [[10, 11, 12, 13, 14, 15], [16]]
    assert [v.tolist() for v in pieces_of(columns, 0, 2)] == [[0, 1]]
    assert pieces_of(columns, 0, 0) == []


def test_chunks_cover_a_record_in_order() -> None:
    row = np.arange(10, dtype=np.uint8).reshape(1, 10)
    assert list(chunks_of(pieces_of([row[:, :6], row[:, 6:]], 0, 9), 4)) == [
        (0, b"\0\1\2\3"), (4, b"\4\5"), (6, b"\6\7\x08"),
    ]  # fmt: skip


def test_buffers_of_several_parts_come_as_a_mapping() -> None:
    whole = np.zeros((2, 10), np.uint8)
    assert list(by_part(TWO, whole, ())) == [0], "the only required part"
    assert list(by_part(TWO, whole, (1,))) == [1]
    with pytest.raises(InvalidArgument, match="hand in a mapping"):
        by_part(TWO, whole, (0, 1))
    parts = (PartBlocks(0, 0, 2), PartBlocks(1, 1, 1))
    side = np.zeros((1, 4), np.uint8)
    sources = sources_of(TWO, parts, {0: whole, 1: side}, {1: [3]})
    assert sources[0].lengths.tolist() == [10, 10]
    assert sources[1].lengths.tolist() == [3]
    with pytest.raises(InvalidArgument, match="part 1 has no buffer"):
        sources_of(TWO, parts, {0: whole}, None)
    with pytest.raises(InvalidArgument, match="named twice"):
        sources_of(TWO, (parts[0], parts[0]), {0: whole}, None)
    with pytest.raises(InvalidArgument, match="mapping part -> lengths"):
        sources_of(TWO, parts, {0: whole, 1: side}, [1])


def test_delivery_counts_what_is_complete_in_every_part() -> None:
    two_shards = Layout(
        "bf16",
        (CacheGroup("kv"),),
        tuple(Part(i, "kv", f"tp{i}", 4, (Segment(0, 1, 0, 4),)) for i in range(2)),
    ).checked()
    book = Delivery(two_shards, (0, 1), 4)
    book.arrive(0, 0, 4)
    assert book.good() == 0
    book.arrive(1, 1, 4)
    assert book.good() == 0
    book.arrive(1, 0, 1)
    assert book.complete()
    book.cut(3, MissReason.CORRUPT)
    book.cut(3, MissReason.EVICTED)
    assert (book.good(), book.reason, book.corrupt) == (3, MissReason.CORRUPT, True)


def test_delivery_of_side_parts_is_shortened_by_a_bad_one_only() -> None:
    book = Delivery(TWO, (0, 1), 4)
    assert book.has_side_parts
    book.arrive(0, 0, 4)
    book.arrive(1, 3, 4)
    assert book.good() == 4
    book.cut(3, MissReason.CORRUPT)
    assert book.good() == 3
    assert not Delivery(LAYOUT, (0,), 2).has_side_parts
