"""News put together: nothing is lost, and what lies together comes together."""

from __future__ import annotations

import numpy as np

from kvstore.api import Extent, Progress
from kvstore.news import joined, within
from kvstore.types import MissReason


def extent(part: int, first: int, count: int) -> Extent:
    numbers = np.arange(100 * part + first, 100 * part + first + count, dtype=np.uint32)
    digests = b"".join(bytes([number]) * 16 for number in numbers.tolist())
    return Extent(part, first, numbers, numbers + 1, numbers + 2, digests)


def news(*extents: Extent, done: bool = False, blocks: int = 9, reason: MissReason | None = None) -> Progress:
    return Progress(7, extents, done, blocks, reason)


def plain(progress: Progress) -> list[tuple[int, int, list[int], list[int], list[int], bytes]]:
    return [
        (e.part, e.first, e.slots.tolist(), e.generations.tolist(), e.lengths.tolist(), e.digests)
        for e in progress.extents
    ]


def test_neighbours_become_one_in_whatever_order_they_came() -> None:
    found = joined([news(extent(1, 0, 2)), news(extent(0, 4, 2)), news(extent(0, 0, 4), extent(0, 7, 1))])
    assert plain(found) == plain(news(extent(0, 0, 6), extent(0, 7, 1), extent(1, 0, 2)))


def test_the_last_word_counts() -> None:
    end = news(done=True, blocks=3, reason=MissReason.CORRUPT)
    found = joined([news(extent(0, 0, 3)), end])
    assert (found.lease, found.done, found.blocks, found.reason) == (7, True, 3, MissReason.CORRUPT)
    assert plain(found) == plain(news(extent(0, 0, 3)))
    assert joined([end]) is end


def test_a_window_of_news() -> None:
    told = news(extent(0, 0, 6), extent(0, 7, 2), extent(1, 3, 1), done=True, blocks=9)
    assert within(told, 0, 0) is told
    assert plain(within(told, 4, 4)) == plain(news(extent(0, 4, 2), extent(0, 7, 1)))
    assert plain(within(told, 3, 1)) == plain(news(extent(0, 3, 1), extent(1, 3, 1)))
    assert plain(within(told, 5, 0)) == plain(news(extent(0, 5, 1), extent(0, 7, 2)))
    assert plain(within(told, 9, 3)) == []
    assert (within(told, 4, 4).done, within(told, 4, 4).blocks) == (True, 9)
