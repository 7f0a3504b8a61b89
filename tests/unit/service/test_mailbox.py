"""A mailbox calls once for all that comes before it is emptied, and never forgets to call."""

from __future__ import annotations

from kvstore.service.mailbox import Mailbox


def test_it_calls_again_only_after_it_was_emptied() -> None:
    calls: list[str] = []
    box: Mailbox[int] = Mailbox(lambda: calls.append("take"))
    box.put(1)
    box.put(2)
    assert (calls, box.take(), box.take()) == (["take"], [1, 2], [])
    box.put(3)
    assert (calls, box.take()) == (["take", "take"], [3])


def test_what_comes_while_it_is_emptied_is_taken_or_called_for() -> None:
    taken: list[int] = []
    box: Mailbox[int] = Mailbox(lambda: taken.extend(box.take()))
    for item in range(5):
        box.put(item)
    assert taken == [0, 1, 2, 3, 4]
