"""How long an acknowledgement for SSD waits for a disk that answers nothing."""

from __future__ import annotations

from kvstore.api import CommitAnswer, OutcomeRun
from kvstore.types import AckTier, PutOutcome
from tests.support.driver import put
from tests.unit.core.rig import Rig


def test_waiting_begins_with_the_first_write() -> None:
    rig = Rig(manual=True)
    acks: list[CommitAnswer] = []
    put(rig.ladder, rig.space, rig.root, rig.keys(3), ack=AckTier.SSD, acks=acks)
    rig.ladder.tick()
    assert not acks
    rig.clock.advance(31)
    rig.ladder.tick()
    assert acks == [CommitAnswer(outcomes=(OutcomeRun(PutOutcome.STORED_HOST, 3),))]
