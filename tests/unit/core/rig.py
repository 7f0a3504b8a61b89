"""A ladder on private memory, a dict for a disk and a hand-moved clock."""

from __future__ import annotations

import random

from kvstore import hashing
from kvstore.api import MatchAnswer, MatchRequest, Progress
from kvstore.clock import ManualClock
from kvstore.core.ladder import Ladder
from kvstore.core.limits import Limits
from kvstore.events import Events
from kvstore.namespace import Namespace
from tests.support.driver import namespace
from tests.support.integrity import check_integrity
from tests.support.memory import DictTier, Disk, PrivateMemory


class Rig:
    """Everything a core test needs, with one namespace open."""

    def __init__(
        self,
        *,
        pages: int = 512,
        space: Namespace | None = None,
        limits: Limits | None = None,
        manual: bool = False,
        disk: Disk | None = None,
        ssd: bool = True,
        clock: ManualClock | None = None,
        declares_root: bool = True,
    ) -> None:
        self.clock = clock or ManualClock()
        self.disk = disk or Disk()
        self.tier = DictTier(self.disk, manual=manual)
        self.events = Events()
        self.alive: set[int] = set()
        self.memory = PrivateMemory(pages)
        rng = random.Random(3)
        self.ladder = Ladder(
            host=self.memory,
            ssd=self.tier if ssd else None,
            clock=self.clock,
            events=self.events,
            limits=limits,
            client_alive=lambda session: session in self.alive,
            new_number=lambda: rng.getrandbits(63) | 1,
        )
        self.ladder.recover()
        self.space = space or namespace()
        self.root = hashing.chain_root(self.space.fingerprint)
        self.ladder.open(self.space, root=self.root if declares_root else b"")

    def keys(self, blocks: int, *, salt: int = 0) -> bytes:
        """A chain of its own for each salt."""
        return hashing.block_hashes(self.root, [salt, *range(1, 4 * blocks)], block_tokens=4)

    def chain(self, choices: list[int]) -> bytes:
        """A chain with one choice a block: equal beginnings are equal blocks."""
        tokens = [token for choice in choices for token in (choice, 0, 0, 0)]
        return hashing.block_hashes(self.root, tokens, block_tokens=4)

    def match(self, keys: bytes, **fields: object) -> MatchAnswer:
        """Match with lease by default."""
        return self.ladder.match(MatchRequest(namespace=self.space.fingerprint, keys=keys, **fields))  # type: ignore[arg-type]

    def length(self, keys: bytes) -> int:
        """How many blocks a match finds, without a trace."""
        from kvstore.types import MatchMode

        return self.match(keys, mode=MatchMode.PROBE).blocks

    def fetch(self, lease: int) -> tuple[Progress, list[Progress]]:
        """Watch a lease and collect its news."""
        news: list[Progress] = []
        return self.ladder.watch(lease, news.append), news

    def tick(self, seconds: float) -> None:
        """Let time pass and the housekeeping run."""
        self.clock.advance(seconds)
        self.ladder.tick()
        check_integrity(self.ladder)
