"""Copies beside what is computed: what is issued in which order, on a stream that only writes it down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvstore.client import Match
from kvstore.engine.loading import Load
from kvstore.engine.streams import STAGINGS, InPlace, SideStream

BLOCKS, WIDTH = 3, 8


@dataclass
class Recorder:
    """A device's stream that does at once what it is told, and its events."""

    told: list[str] = field(default_factory=list)
    marks: int = 0

    def __enter__(self) -> Recorder:
        self.told.append("enter")
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        self.told.append("exit")

    def record_event(self) -> RecordedMark:
        self.marks += 1
        self.told.append(f"record {self.marks}")
        return RecordedMark(self, self.marks)


@dataclass
class RecordedMark:
    stream: Recorder
    number: int

    def wait(self) -> None:
        self.stream.told.append(f"wait {self.number}")

    def synchronize(self) -> None:
        self.stream.told.append(f"synchronize {self.number}")


class Allocator:
    """Counts the stagings that it makes."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, shape: torch.Size) -> torch.Tensor:
        self.made += 1
        return torch.empty(shape, dtype=torch.uint8)


def views(count: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(BLOCKS, WIDTH, dtype=torch.uint8) for _ in range(count)]


def test_host_memory_is_filled_where_it_lies() -> None:
    copies, layers = InPlace(), views()
    for array in copies.staging(layers):
        array[:] = 7
    assert copies.send(layers) is None
    copies.finish()
    assert all(int(layer.min()) == 7 for layer in layers)
    assert np.shares_memory(copies.receive(layers)[0], layers[0].numpy())


def test_the_cpu_needs_no_stream() -> None:
    assert type(SideStream.of(torch.device("cpu"))) is InPlace


def test_a_staging_is_not_filled_again_before_its_copy_is_over() -> None:
    stream, allocator = Recorder(), Allocator()
    copies = SideStream(stream, allocator)
    stages = [views() for _ in range(STAGINGS + 2)]
    for number, stage in enumerate(stages):
        for array in copies.staging(stage):
            array[:] = number + 1
        copies.send(stage)
    copies.finish()
    copied = [["enter", "exit", f"record {n}"] for n in range(1, len(stages) + 1)]
    assert stream.told == [
        *copied[0],
        *copied[1],
        "synchronize 1",
        *copied[2],
        "synchronize 2",
        *copied[3],
        "synchronize 3",
        "synchronize 4",
    ]
    assert allocator.made == STAGINGS * 2
    assert [int(layer.max()) for stage in stages for layer in stage] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_shorter_stretch_gets_a_staging_of_its_own() -> None:
    copies = SideStream(Recorder(), Allocator())
    for rows in (3, 2, 1):
        stage = [torch.zeros(rows, WIDTH, dtype=torch.uint8)]
        (array,) = copies.staging(stage)
        array[:] = rows
        copies.send(stage)
        assert stage[0].tolist() == [[rows] * WIDTH] * rows


def test_what_is_saved_is_out_when_it_is_handed_over() -> None:
    stream = Recorder()
    layers = [layer.add(9) for layer in views()]
    out = SideStream(stream, Allocator()).receive(layers)
    assert stream.told == ["enter", "exit", "record 1", "synchronize 1"]
    assert all((array == 9).all() for array in out)
    assert not np.shares_memory(out[0], layers[0].numpy())


def test_who_computes_waits_on_the_device_for_just_the_stage_that_it_needs() -> None:
    stream = Recorder()
    load = Load(Match(blocks=1), first=0, pages=[1])
    for _ in range(2):
        load.arrive(stream.record_event())
    assert load.wait(0, seconds=0.0) and not load.wait(2, seconds=0.0)
    assert stream.told == ["record 1", "record 2", "wait 1"]
