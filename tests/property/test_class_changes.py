"""Random changes and undos of classes: what is seen follows the present lives, and nothing that an undo could
show again leaves before the window is over.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from kvstore.errors import InvalidArgument
from kvstore.retention import HOUR, UNDO_SECONDS
from tests.support.driver import put
from tests.unit.core.rig import Rig

NAMES = ("agent", "chat", "batch")
LIVES = (30.0, 300.0, 2000.0, HOUR, 10 * HOUR)


@dataclass(slots=True)
class Run:
    """One stored run: who holds it since when, and whether its time was over at some tick for good."""

    keys: bytes
    name: str
    since: float
    may_be_gone: bool = False


class History:
    """One random history on a ladder, and what must be seen after each step."""

    def __init__(self, seed: int, *, ssd: bool) -> None:
        self.rng = random.Random(seed)
        self.rig = Rig(ssd=ssd, pages=2048)
        self.runs: list[Run] = []

    def lives(self, run: Run) -> bool:
        table, now = self.rig.ladder.class_table(), self.rig.ladder.wall()
        return now < run.since + table.named(run.name).ttl_seconds

    def step(self) -> None:
        ladder, rng = self.rig.ladder, self.rng
        what = rng.choice(("put", "set", "set", "undo", "tick", "tick", "read"))
        if what == "put":
            run = Run(self.rig.keys(3, salt=len(self.runs) + 1), rng.choice(NAMES), ladder.wall())
            put(ladder, self.rig.space, self.rig.root, run.keys, retention_class=run.name)
            self.runs.append(run)
        elif what == "read" and self.runs:
            run = rng.choice(self.runs)
            if self.rig.length(run.keys):
                ladder.release(self.rig.match(run.keys).lease, used=3)
                run.since = ladder.wall()
        elif what in ("set", "undo"):
            self.change(rng.choice(NAMES), undo=what == "undo")
        elif what == "tick":
            self.rig.tick(rng.choice((1.0, 60.0, UNDO_SECONDS / 2, UNDO_SECONDS + 1)))
            table, now = ladder.class_table(), ladder.wall()
            for run in self.runs:
                run.may_be_gone |= now >= run.since + table.keep_seconds(run.name, now)

    def change(self, name: str, *, undo: bool) -> None:
        ladder = self.rig.ladder
        table, now = ladder.class_table(), ladder.wall()
        try:
            after = replace(table.named(name), ttl_seconds=self.rng.choice(LIVES))
            wanted = table.undone(name, at=now) if undo else table.changed(after, at=now)
        except InvalidArgument:
            return
        hides, shows = ladder.effect(wanted).hides.blocks, ladder.effect(wanted).shows.blocks
        before = self.seen()
        ladder.adopt(wanted)
        assert self.seen() - before == shows - hides

    def seen(self) -> int:
        return sum(self.rig.length(run.keys) for run in self.runs)

    def check(self) -> None:
        for run in self.runs:
            found = self.rig.length(run.keys)
            if not self.lives(run):
                assert not found, "seen beyond its life"
            elif not run.may_be_gone:
                assert found == 3, "gone though an undo could show it"


@pytest.mark.parametrize("ssd", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_seen_follows_the_present_lives(seed: int, ssd: bool) -> None:
    history = History(seed, ssd=ssd)
    for _ in range(60):
        history.step()
        history.check()
