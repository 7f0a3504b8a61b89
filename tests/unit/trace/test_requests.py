"""Trace files: both formats, bad lines, ids as keys."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvstore.errors import InvalidArgument
from kvstore.trace.requests import TraceFile, TraceRequest


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_mooncake_lines_become_runs(tmp_path: Path) -> None:
    line = {"timestamp": 3, "input_length": 1500, "output_length": 7, "hash_ids": [0, 1, 2, 9, 10]}
    trace = TraceFile(written(tmp_path / "t.jsonl", line))
    assert trace.block_tokens == 512
    assert list(trace) == [TraceRequest(3, 1500, 7, ((0, 3), (9, 2)))]


def test_runs_files_say_their_block_size(tmp_path: Path) -> None:
    meta = {"_meta": {"format": "kvstore-runs/1", "block_size": 64}}
    line = {"timestamp": 0, "input_length": 200, "output_length": 1, "hash_runs": [[5, 3]]}
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(meta) + "\n" + json.dumps(line) + "\n").encode()))
    trace = TraceFile(path)
    assert trace.block_tokens == 64
    assert list(trace) == [TraceRequest(0, 200, 1, ((5, 3),))]


def test_requests_are_sorted_by_time_then_by_place(tmp_path: Path) -> None:
    lines = [{"timestamp": t, "input_length": i, "hash_ids": []} for i, t in enumerate((5, 1, 5, 0))]
    trace = TraceFile(written(tmp_path / "t.jsonl", *lines))
    assert [request.input_tokens for request in trace.sorted()] == [3, 1, 0, 2]


def test_equal_ids_are_equal_keys_and_different_ids_are_not() -> None:
    first = TraceRequest(0, 0, 0, ((0, 2), (7, 1))).keys()
    second = TraceRequest(0, 0, 0, ((0, 1), (1, 1), (7, 1))).keys()
    assert first == second
    assert len({first[i : i + 32] for i in range(0, 96, 32)}) == 3
    assert first[:32] != bytes(32)


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        '{"timestamp": 0}',
        '{"timestamp": 0, "input_length": -1, "hash_ids": []}',
        '{"timestamp": "x"}',
        "7",
    ],
)
def test_bad_lines_are_told_by_number_and_skipped(tmp_path: Path, bad: str) -> None:
    good = {"timestamp": 0, "input_length": 1, "hash_ids": [1]}
    told: list[tuple[int, str]] = []
    path = written(tmp_path / "t.jsonl", good, bad, good)
    trace = TraceFile(path, complain=lambda number, fault: told.append((number, fault)))
    assert len(list(trace)) == 2
    assert [number for number, _ in told] == [2]
    assert trace.lines_skipped == 1


@pytest.mark.parametrize("first", ["", "no json", "[]", '{"_meta": {"format": "other/2"}}'])
def test_files_that_are_no_trace_are_refused(tmp_path: Path, first: str) -> None:
    with pytest.raises(InvalidArgument, match=r"t\.jsonl"):
        TraceFile(written(tmp_path / "t.jsonl", first))


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        TraceFile(tmp_path / "none.jsonl")
