"""The plan of a run: what is done to daemon and clients, and when. The same seed gives the same plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Blow(StrEnum):
    """One bad thing. The quiet kill holds the clients still until the recovered daemon has been audited."""

    KILL_QUIET = "kill_quiet"
    KILL_BUSY = "kill_busy"
    KILL_STARTING = "kill_starting"
    TERM = "term"
    STOP = "stop"
    KILL_CLIENT = "kill_client"
    STOP_CLIENT = "stop_client"


KILLS = frozenset({Blow.KILL_QUIET, Blow.KILL_BUSY, Blow.KILL_STARTING})
_WEIGHTS = {
    Blow.KILL_QUIET: 50,
    Blow.KILL_BUSY: 12,
    Blow.KILL_STARTING: 8,
    Blow.TERM: 8,
    Blow.STOP: 8,
    Blow.KILL_CLIENT: 7,
    Blow.STOP_CLIENT: 7,
}


@dataclass(frozen=True, slots=True)
class Step:
    """Wait `after_seconds`, then do `blow`; `hold_seconds` is how long a stop lasts, or a start may run."""

    blow: Blow
    after_seconds: float
    hold_seconds: float
    victim: int
    """Which client; taken modulo their number."""


def plan(seed: int, *, kills: bool = True) -> Iterator[Step]:
    """Yield steps without end; without kills the daemon lives through all of them."""
    dice = random.Random(seed)
    blows = [blow for blow in Blow if kills or blow in (Blow.STOP, Blow.KILL_CLIENT, Blow.STOP_CLIENT)]
    weights = [_WEIGHTS[blow] for blow in blows]
    pace = 1.0 if kills else 10.0
    while True:
        yield Step(
            dice.choices(blows, weights)[0],
            after_seconds=pace * dice.uniform(0.15, 0.8),
            hold_seconds=dice.uniform(0.05, 0.9),
            victim=dice.randrange(1 << 16),
        )
