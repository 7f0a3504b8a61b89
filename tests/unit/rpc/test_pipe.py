"""The socket under payload: every byte in its place, every wait bounded."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.rpc.packets import Header, Kind
from kvstore.rpc.pipe import VIEWS_MAX, Pipe, View, countdown

Pair = tuple[Pipe, Pipe]


def ample() -> float:
    return 20.0


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


@pytest.fixture(params=[socket.socketpair, tcp_pair], ids=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    one, other = map(Pipe, request.param())
    yield one, other
    one.close()
    other.close()


def beside(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_what_is_written_in_pieces_is_read_in_other_pieces(pair: Pair) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3_000_000, np.uint8)
    cuts = np.sort(np.random.default_rng(2).integers(0, len(data), 3 * VIEWS_MAX))
    views: list[View] = [piece.data for piece in np.split(data, cuts)]
    writing = beside(lambda: pair[0].write(views, ample))
    into = np.zeros_like(data)
    other_cuts = np.sort(np.random.default_rng(3).integers(0, len(data), 2 * VIEWS_MAX))
    pair[1].read([piece.data for piece in np.split(into, other_cuts)], ample)
    writing.join()
    assert np.array_equal(into, data)


def test_nothing_is_written_and_read_at_once(pair: Pair) -> None:
    pair[0].write([], ample)
    pair[0].write([b"", memoryview(b"")], ample)
    pair[1].read([memoryview(bytearray())], ample)
    assert pair[1].is_quiet()


def test_a_header_and_its_body(pair: Pair) -> None:
    pair[0].write([Header(Kind.PROGRESS, 3).pack(), b"abc"], ample)
    header = pair[1].header(ample, limit=3)
    assert header == Header(Kind.PROGRESS, 3)
    assert pair[1].body(header, ample) == b"abc"


@pytest.mark.parametrize("seconds", [0.0, -1.0, 0.01])
def test_a_read_ends_in_time_also_when_some_has_come(seconds: float, pair: Pair) -> None:
    pair[0].write([b"half"], ample)
    with pytest.raises(TimeoutError):
        pair[1].read([memoryview(bytearray(8))], countdown(seconds))


def test_a_write_that_nobody_reads_ends_in_time(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        pair[0].write([bytes(64 << 20)], countdown(0.05))


def test_the_end_of_the_other_is_told_from_silence(pair: Pair) -> None:
    one, other = pair
    assert one.is_quiet() and not one.has_ended()
    other.write([b"x"], ample)
    assert not one.is_quiet() and not one.has_ended()
    one.read([memoryview(bytearray(1))], ample)
    assert one.is_quiet()
    other.close()
    assert one.has_ended() and not one.is_quiet()
    with pytest.raises(ConnectionResetError):
        one.read([memoryview(bytearray(1))], ample)


def test_a_connection_is_cut_under_who_waits_on_it(pair: Pair) -> None:
    failures: list[OSError] = []

    def wait() -> None:
        try:
            pair[0].read([memoryview(bytearray(1))], ample)
        except OSError as error:
            failures.append(error)

    waiting = beside(wait)
    pair[0].cut()
    waiting.join(20)
    assert isinstance(failures[0], ConnectionResetError)


def test_who_lingers_lets_the_last_word_be_read(pair: Pair) -> None:
    """Closing at once would throw away what was written, since the other end's bytes lie unread."""
    one, other = pair
    other.write([bytes(100_000)], ample)
    one.write([b"why"], ample)

    def end() -> None:
        one.linger()
        one.close()

    lingering = beside(end)
    word = bytearray(3)
    other.read([memoryview(word)], ample)
    assert word == b"why"
    with pytest.raises(ConnectionResetError):
        other.read([memoryview(word)], ample)
    other.close()
    lingering.join()


def test_a_forked_child_lets_go_without_ending(pair: Pair) -> None:
    one, other = pair
    copy = Pipe(one.sock.dup())
    copy.drop()
    copy.drop()
    one.write([b"x"], ample)
    word = bytearray(1)
    other.read([memoryview(word)], ample)
    assert word == b"x"
