"""What the client's verbs return. A miss is one of these values, with its reason; never an exception."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.api import Extent, OutcomeRun, TierRun
from kvstore.types import MissReason, PutOutcome

if TYPE_CHECKING:
    from kvstore.client.link import Link
    from kvstore.client.loading import Loading

STORED = frozenset({PutOutcome.STORED_HOST, PutOutcome.STORED_SSD})
PRESENT = STORED | {PutOutcome.DUPLICATE}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """What is there, as kvstore.api.MatchAnswer says it, and how to get at it.

    `parts` is what the match asked extents of. `loading` hears of blocks on their way to host; `link` is the
    connection whose arena the extents point into. A match made by hand from a lease alone (another process
    took it) has neither and can still be fetched.
    """

    blocks: int
    boundaries: tuple[int, ...] = ()
    reason: MissReason | None = None
    lease: int = 0
    lease_seconds: float = 0.0
    tiers: tuple[TierRun, ...] = ()
    ready: bool = True
    extents: tuple[Extent, ...] = ()
    bitmap: bytes = b""
    parts: tuple[int, ...] = ()
    loading: Loading | None = None
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """The first `blocks` blocks are in the caller's buffers, each checked; `reason` says why not more."""

    blocks: int
    reason: MissReason | None = None
    seconds: float = 0.0
    tiers: tuple[TierRun, ...] = ()


@dataclass(frozen=True, slots=True)
class Put:
    """What became of each block; `reason` is set when the daemon could not be asked, or not to the end."""

    outcomes: tuple[OutcomeRun, ...] = ()
    reason: MissReason | None = None

    @property
    def stored(self) -> int:
        """Blocks that this put stored."""
        return _count(self.outcomes, STORED)

    @property
    def present(self) -> int:
        """Blocks that are there now, by this put or before it."""
        return _count(self.outcomes, PRESENT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reservation:
    """Slots to write, for engines that copy themselves (mapped transport).

    `reservation` 0 means that there is nothing to write: the outcomes, or the reason, say why.
    """

    reservation: int = 0
    blocks: int = 0
    outcomes: tuple[OutcomeRun, ...] = ()
    extents: tuple[Extent, ...] = ()
    seconds: float = 0.0
    reason: MissReason | None = None
    link: Link | None = None


def final_outcomes(reserved: Iterable[OutcomeRun], committed: Iterable[OutcomeRun]) -> tuple[OutcomeRun, ...]:
    """Return one outcome per block of a put: what the commit says where it speaks of reserved blocks only."""
    before, after = tuple(reserved), tuple(committed)
    if sum(run.count for run in before) == sum(run.count for run in after):
        return _joined(after)
    answers = deque(after)
    final: list[OutcomeRun] = []
    for run in before:
        final += _taken(answers, run) if run.outcome is PutOutcome.RESERVED else (run,)
    return _joined(final)


def _taken(answers: deque[OutcomeRun], asked: OutcomeRun) -> Iterator[OutcomeRun]:
    """Take the answers of so many blocks; what nobody speaks of stays as it was asked."""
    left = asked.count
    while left and answers:
        answer = answers.popleft()
        count = min(left, answer.count)
        if count < answer.count:
            answers.appendleft(OutcomeRun(answer.outcome, answer.count - count))
        yield OutcomeRun(answer.outcome, count)
        left -= count
    if left:
        yield OutcomeRun(asked.outcome, left)


def _joined(runs: Iterable[OutcomeRun]) -> tuple[OutcomeRun, ...]:
    groups = itertools.groupby(runs, key=operator.attrgetter("outcome"))
    counted = ((outcome, sum(run.count for run in group)) for outcome, group in groups)
    return tuple(OutcomeRun(outcome, count) for outcome, count in counted if count)


def _count(runs: Iterable[OutcomeRun], wanted: frozenset[PutOutcome]) -> int:
    return sum(run.count for run in runs if run.outcome in wanted)
