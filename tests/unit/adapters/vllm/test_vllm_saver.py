"""The saving thread: who waits for it hears of its end, and what fails is counted."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np

from engine_adapters.vllm.memory import HostMemory
from engine_adapters.vllm.messages import SaveJob
from engine_adapters.vllm.saver import Saver
from engine_adapters.vllm.tally import Tally
from kvstore.client import OpenNamespace, Put
from kvstore.clock import SystemClock
from kvstore.errors import InvalidArgument
from kvstore.types import BlockHash

SECONDS = 60.0
"""Nothing waits so long that works."""


class SlowNamespace:
    """Puts when it may; raises what it is told."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_go = threading.Event()
        self.error: Exception | None = None

    def put(self, *_: Any, **__: Any) -> Put:
        self.begun.set()
        assert self.may_go.wait(SECONDS)
        if self.error is not None:
            raise self.error
        return Put()


def job(request_id: str, blocks: int = 1) -> SaveJob:
    return SaveJob(
        request_id=request_id,
        namespace=b"",
        parent=BlockHash(bytes(32)),
        keys=bytes(32 * blocks),
        block_ids=tuple(range(blocks)),
        put_id=bytes(16),
        retention_class="",
    )


def saver_of(space: SlowNamespace, tally: Tally) -> Saver:
    return Saver(
        HostMemory([np.zeros((4, 8), np.uint8)]),
        lambda _: cast(OpenNamespace, space),
        tally,
        part=0,
        queue_blocks=4,
        put_seconds=SECONDS,
        clock=SystemClock(),
    )


def test_a_flush_ends_with_the_last_put() -> None:
    space = SlowNamespace()
    saver = saver_of(space, Tally())
    saver.submit([job("a")])
    assert space.begun.wait(SECONDS)
    assert not saver.unread({"a"}), "its blocks are free while it is put"
    flushed = threading.Thread(target=saver.flush, args=(100 * SECONDS,), daemon=True)
    flushed.start()
    space.may_go.set()
    flushed.join(SECONDS)
    assert not flushed.is_alive(), "it waits for its deadline"
    saver.close(SECONDS)


def test_a_put_that_fails_is_counted_and_the_next_one_is_tried() -> None:
    space, tally = SlowNamespace(), Tally()
    saver = saver_of(space, tally)
    space.error = InvalidArgument("retention class 'x' is unknown")
    saver.submit([job("a", 2)])
    assert space.begun.wait(SECONDS)
    space.may_go.set()
    assert saver.flush(SECONDS)
    space.error = None
    saver.submit([job("b")])
    saver.close(SECONDS)
    counts = tally.take()
    assert counts["stored_blocks/failed"] == 2
    assert counts["save_bytes"] == 8
