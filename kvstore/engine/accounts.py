"""What requests took and what hits saved, by retention class."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from kvstore.engine.costs import StepCosts
from kvstore.engine.request import Usage


@dataclass(slots=True)
class Account:
    """The sum of many requests. Units: tokens; seconds of this engine that hits made unnecessary."""

    requests: int = 0
    input: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    generated: int = 0
    saved_seconds: float = 0.0

    @property
    def hit(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.hits.values())


class Accounts:
    """One account per retention class. Threads: any."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._lock = threading.Lock()
        self._by_class: dict[str, Account] = {}

    def add(self, retention_class: str, usage: Usage) -> None:
        """Count a request that has ended."""
        with self._lock:
            account = self._by_class.setdefault(retention_class, Account())
            account.requests += 1
            account.input += usage.input
            account.computed += usage.computed
            account.generated += usage.generated
            account.saved_seconds += self._costs.span(0, usage.hit)
            for tier, tokens in usage.hits.items():
                account.hits[tier] = account.hits.get(tier, 0) + tokens

    def by_class(self) -> dict[str, Account]:
        """Return the accounts as they are now."""
        with self._lock:
            return {
                name: replace(account, hits=dict(account.hits)) for name, account in self._by_class.items()
            }
