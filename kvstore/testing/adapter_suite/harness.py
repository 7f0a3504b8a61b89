"""What an author hands in: how an engine with the adapter is started and asked. Knows no store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


class Cancelled(Exception):
    """A request ended because `cancel` was called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A greedy answer, and what the adapter says of the prompt's hit.

    `hit_tokens` counts, by tier (`host`, `ssd`), the tokens that were delivered, not those that were planned.
    `reasons` says why the hit was not longer, in the words of kvstore.types.MissReason; empty for a full hit.
    """

    ids: tuple[int, ...]
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    @property
    def hit(self) -> int:
        """Tokens of the prompt that came from the store."""
        return sum(self.hit_tokens.values())


class Engine(Protocol):
    """An engine in a process of its own.

    Threads: `generate` is called by one thread at a time; `cancel`, where there is one, by another.
    """

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Answer:
        """Answer greedily with exactly `new_tokens` tokens.

        Errors: Cancelled; whatever else is raised counts as a failed request.
        """
        ...

    def forget(self) -> None:
        """Wait until what the engine saves is saved, then drop the prompts that it keeps in its own memory.

        The next hit can then only come from the store.
        """
        ...

    def close(self) -> None:
        """End the process in the orderly way."""
        ...


@runtime_checkable
class Cancellable(Engine, Protocol):
    """An engine whose request can be given up while it runs."""

    def cancel(self) -> None:
        """Let the `generate` that runs end with Cancelled, or at once with its answer if it is done."""
        ...
