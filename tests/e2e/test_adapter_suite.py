"""The smallest engine passes the suite for engine adapters, as two ranks."""

from __future__ import annotations

import pytest

from kvstore.testing.adapter_suite import AdapterSuite, Engine, Sizes
from kvstore.testing.adapter_suite.toy import VOCABULARY, ToyEngine


@pytest.mark.slow
class TestToyEngineOfTwoRanks(AdapterSuite):
    sizes = Sizes(
        vocabulary=VOCABULARY, prompt_tokens=100, block_tokens=16, full_hit_tokens=96, arena_bytes=16 << 20
    )
    ranks = 2

    @classmethod
    def start_engine(cls, address: str | None, *, patience_seconds: float, other_model: bool) -> Engine:
        weights = "v2" if other_model else "v1"
        return ToyEngine(address, patience_seconds=patience_seconds, weights=weights, ranks=cls.ranks)
