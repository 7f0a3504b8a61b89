"""How fast the engine computes prompts: a load that takes longer than computing is given up, or not begun."""

from __future__ import annotations

import math
from collections import deque

from kvstore.clock import Clock

STEP_TOKENS_MIN = 128
"""Steps of fewer tokens say nothing about prompts."""


class Pace:
    """The time per token that the user states, else the best so far, seen from the scheduler.

    Up to `batches` steps are under way at once; a step is certainly over when so many later ones have begun.
    """

    def __init__(self, clock: Clock, *, batches: int, tokens_per_second: float = 0.0) -> None:
        self._clock = clock
        self._begun: deque[tuple[float, int]] = deque(maxlen=max(1, batches))
        self._is_stated = tokens_per_second > 0.0
        self._token_seconds = 1.0 / tokens_per_second if self._is_stated else math.inf

    def step(self, tokens: int) -> None:
        """A step of so many tokens begins."""
        now = self._clock.monotonic()
        if len(self._begun) == self._begun.maxlen and not self._is_stated:
            begun, computed = self._begun[0]
            if computed >= STEP_TOKENS_MIN:
                self._token_seconds = min(self._token_seconds, (now - begun) / computed)
        self._begun.append((now, tokens))

    def seconds(self, tokens: int) -> float:
        """Return how long computing that many tokens takes; endless while nothing is known."""
        return tokens * self._token_seconds

    def deadline(self, tokens: int, *, least: float, most: float) -> float:
        """Return how long loading that many tokens may take."""
        return min(most, max(least, self.seconds(tokens)))
