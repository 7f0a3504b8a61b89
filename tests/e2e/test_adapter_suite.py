"""Adapters that pass the suite: the smallest one as two ranks, transformers with a tiny and a real model."""

from __future__ import annotations

import sys

import pytest

from kvstore.testing.adapter_suite import AdapterSuite, Engine, Sizes
from kvstore.testing.adapter_suite.process import Nursery
from kvstore.testing.adapter_suite.toy import VOCABULARY


class InProcesses(AdapterSuite):
    """Engines forked by a nursery."""

    command: tuple[str, ...]
    nursery: Nursery

    @classmethod
    def setup_class(cls) -> None:
        cls.nursery = Nursery([sys.executable, "-m", *cls.command])

    @classmethod
    def teardown_class(cls) -> None:
        cls.nursery.close()

    @classmethod
    def start_engine(cls, address: str | None, *, patience_seconds: float, other_model: bool) -> Engine:
        return cls.nursery.engine(
            {
                "address": address,
                "patience_seconds": patience_seconds,
                "other_model": other_model,
                "block_tokens": cls.sizes.block_tokens,
            }
        )


@pytest.mark.slow
class TestToyEngineOfTwoRanks(InProcesses):
    """A process for each rank."""

    sizes = Sizes(
        vocabulary=VOCABULARY, prompt_tokens=100, block_tokens=16, full_hit_tokens=96, arena_bytes=16 << 20
    )
    command = ("tests.e2e.toy_ranks",)
    ranks = 2


@pytest.mark.timeout(300)  # the first scenario waits for the engine's imports
class TestTransformers(InProcesses):
    """A model with random weights."""

    sizes = Sizes(
        vocabulary=500, prompt_tokens=100, block_tokens=16, full_hit_tokens=80, arena_bytes=16 << 20
    )
    command = ("tests.e2e.transformers_engine", "tiny")


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(420)  # the first run on a machine converts the model
class TestTransformersWithSmolLM2(InProcesses):
    """A real model."""

    sizes = Sizes(
        vocabulary=49_000,
        prompt_tokens=200,
        block_tokens=64,
        full_hit_tokens=128,
        arena_bytes=64 << 20,
        answer_seconds_max=240.0,
    )
    command = ("tests.e2e.transformers_engine", "smollm2")
