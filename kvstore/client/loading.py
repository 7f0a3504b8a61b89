"""News of a lease whose blocks are on their way to host, kept in order for whoever fetches."""

from __future__ import annotations

import threading

from kvstore.api import Progress
from kvstore.layout import Layout
from kvstore.news import joined
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import progress_from_wire
from kvstore.types import MissReason


class Loading:
    """The progress of one match. News may come before the match's own answer, and in any order.

    Threads: the session's reader puts; any number of readers ask, each with a position of its own.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._changed = threading.Condition()
        self._events: list[pb.ProgressEvent] = []
        self._read: list[Progress] = []
        self._over = False

    def put(self, event: pb.ProgressEvent | None) -> None:
        """Take an event; None means that the session ended first."""
        with self._changed:
            if event is None:
                event = pb.ProgressEvent(done=True, reason=pb.MISS_REASON_DAEMON_GONE)
            self._events.append(event)
            self._over = self._over or event.done
            self._changed.notify_all()

    def after(self, position: int, seconds: float) -> tuple[Progress, int] | None:
        """Return the events from `position` on as one, and the position behind them; waits up to `seconds`
        for the first, and returns None when it did not come.

        Errors: InvalidArgument when one does not fit the layout.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) > position, seconds)
            for event in self._events[len(self._read) :]:  # read once, however often it is asked for
                self._read.append(progress_from_wire(event, self._layout))
            news = self._read[position:]
        return (joined(news), position + len(news)) if news else None

    @property
    def over(self) -> bool:
        """Say whether nothing more will come."""
        return self._over


def lost(progress: Progress) -> bool:
    """Say whether this news is the end of the session."""
    return progress.done and progress.reason is MissReason.DAEMON_GONE
