"""How everything is measured: rounds that alternate a thing and its baseline, and ratios of their medians.

Absolute speed drifts by half within minutes on a shared machine; a ratio inside one run does not.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from kvstore.bench.rows import Better, Row, RowSpec
from kvstore.cli.child import ChildDaemon

T = TypeVar("T")
Action = Callable[[], float]
"""Does the thing once and returns the seconds that count; what it prepares or clears away does not."""
ROUNDS, ROUNDS_QUICK, WARM_UP_ROUNDS = 15, 5, 2
TOUCH_SECONDS_MAX = 15.0


@dataclass(frozen=True, slots=True)
class Bench:
    """What a group gets: how hard to try, where to put files, and whom to tell how far it is."""

    rounds: int
    is_quick: bool
    directory: Path
    shared_memory: Path
    tell: Callable[[str], None]

    def alternate(self, label: str, *, warm_up: int = WARM_UP_ROUNDS, **actions: Action) -> Timings:
        """Run every action once a round, in turns of order, and return the seconds of each."""
        taken: dict[str, list[float]] = {name: [] for name in actions}
        order = list(actions)
        for number in self._rounds(label, warm_up):
            for name in order if number % 2 else reversed(order):
                with no_collection():
                    seconds = actions[name]()
                if number >= 0:
                    taken[name].append(seconds)
        return Timings(taken)

    def together(
        self, label: str, once: Callable[[], dict[str, float]], *, warm_up: int = WARM_UP_ROUNDS
    ) -> Timings:
        """Run what measures several steps of one thing once a round, and return the seconds of each."""
        rounds: list[dict[str, float]] = []
        for _ in self._rounds(label, warm_up):
            with no_collection():
                rounds.append(once())
        return Timings({name: [seconds[name] for seconds in rounds[warm_up:]] for name in rounds[0]})

    def _rounds(self, label: str, warm_up: int) -> Iterator[int]:
        """Yield the numbers of the rounds, those below 0 to warm up, and tell of each."""
        for number in range(-warm_up, self.rounds):
            self.tell(f"{label}, round {max(number + 1, 0)} of {self.rounds}")
            yield number

    @contextmanager
    def daemon(self, *, arena_bytes: int, settings: dict[str, str] | None = None) -> Iterator[ChildDaemon]:
        """Run a daemon with its own directories while the body runs."""
        everything = {"host.directory": str(self.shared_memory), **(settings or {})}
        with self.scratch() as directory:
            self.tell("starting a daemon")
            with ChildDaemon(directory, arena_bytes=arena_bytes, settings=everything) as child:
                child.wait_touched(deadline_seconds=TOUCH_SECONDS_MAX)
                yield child

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Lend a directory on the disk that is measured."""
        with TemporaryDirectory(prefix="kvstore-bench-", dir=self.directory) as name:
            yield Path(name)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of every action, round by round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median of one action."""
        return statistics.median(self.seconds[name])

    def row(
        self, spec: RowSpec, thing: str, baseline: str, *, note: str = "", bar: float | None = None
    ) -> Row:
        """Return a row: the ratio of the medians, and how far the rounds spread."""
        by_round = [
            _ratio(spec.better, one, other)
            for one, other in zip(self.seconds[thing], self.seconds[baseline], strict=True)
        ]
        value = _ratio(spec.better, self.median(thing), self.median(baseline))
        low, high = _middle_half(by_round)
        detail = (
            f"{milliseconds(self.median(thing))} against {milliseconds(self.median(baseline))}, "
            f"{len(by_round)} rounds, middle half {low:.2f}-{high:.2f}"
        )
        return Row(spec, value, f"{detail}; {note}" if note else detail, bar)


def _ratio(better: Better, thing_seconds: float, baseline_seconds: float) -> float:
    if better is Better.HIGHER:
        return baseline_seconds / thing_seconds
    return thing_seconds / baseline_seconds


def _middle_half(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds with three digits that count."""
    return f"{1000 * seconds:.3g} ms"


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def timed_of(action: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that one call takes, and what it returns."""
    began = time.perf_counter()
    found = action()
    return time.perf_counter() - began, found


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's cycle collector out of the body."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
