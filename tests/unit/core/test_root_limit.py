"""Chain roots stay for good, so there is a limit of them."""

from __future__ import annotations

import pytest

from kvstore.core.limits import Limits
from kvstore.errors import Overloaded
from tests.unit.core.rig import Rig


def test_roots_of_a_namespace_have_a_limit() -> None:
    rig = Rig(limits=Limits(roots_max=2))
    rig.ladder.open(rig.space, root=bytes(32))
    for root in (rig.root, bytes(32), b""):
        rig.ladder.open(rig.space, root=root)
    with pytest.raises(Overloaded, match="the limit is 2 chain roots of a namespace, got one more"):
        rig.ladder.open(rig.space, root=b"\x01" * 32)
