"""Every trace format: the same traffic written in each of them reads the same."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest
import zstandard

from kvstore.errors import InvalidArgument
from kvstore.trace import streams
from kvstore.trace.classing import parse_rules
from kvstore.trace.requests import TraceFile, TraceFormat, TraceRequest

MOONCAKE = [
    {"timestamp": 0, "input_length": 130, "output_length": 5, "hash_ids": [7, 8, 9], "block_size": 64},
    {"timestamp": 1500, "input_length": 128, "output_length": 0, "hash_ids": [7, 8], "block_size": 64},
]
WANTED = [TraceRequest(0, 130, 5, ((7, 3),)), TraceRequest(1500, 128, 0, ((7, 2),))]


def written(path: Path, *documents: object) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def read(path: Path, **options: object) -> list[TraceRequest]:
    """Requests of a trace in which no line may be bad."""
    trace = TraceFile(path, complain=lambda n, fault: pytest.fail(f"{n}: {fault}"), **options)  # type: ignore[arg-type]
    return trace.sorted()


def test_bailian_lines_count_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    lines = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 40, "output_length": 3}
        | {"type": "text", "turn": 1, "hash_ids": [5, 6, 9]},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 61.114, "input_length": 32, "output_length": 1}
        | {"type": "search", "turn": 2, "hash_ids": [5, 6]},
    ]
    path = written(tmp_path / "t.jsonl", *lines)
    assert TraceFile(path).form is TraceFormat.BAILIAN
    assert TraceFile(path).block_tokens == 16
    assert read(path) == [TraceRequest(0, 40, 3, ((5, 2), (9, 1))), TraceRequest(61114, 32, 1, ((5, 2),))]


def test_simulator_lines_may_have_no_time_and_weigh_their_blocks(tmp_path: Path) -> None:
    lines = [
        {"block_size": 64, "hash_ids": ["2001", "a", "b"], "input_length": 150, "block_tokens": [64, 64, 22]},
        {"block_size": 64, "hash_ids": [2001, "a", "c"], "input_length": 150},
    ]
    path = written(tmp_path / "t.jsonl", *lines)
    assert TraceFile(path).form is TraceFormat.SIMULATOR
    first, second = read(path)
    assert (first.timestamp_ms, first.weights, first.hit_tokens(3, block_tokens=64)) == (0, (64, 64, 22), 150)
    assert first.hit_tokens(2, block_tokens=64) == second.hit_tokens(2, block_tokens=64) == 128
    assert first.keys()[:64] == second.keys()[:64]
    assert first.keys()[64:] != second.keys()[64:]


def session(name: str, **more: object) -> dict[str, object]:
    """Two requests, and between them a sub-agent that starts 3 s in and asks 0.5 s later."""
    inner = {"t": 0.5, "type": "s", "in": 64, "out": 2, "hash_ids": [9], "model": "small"}
    return {
        "id": name,
        "block_size": 64,
        "requests": [
            {"t": 0.0, "type": "s", "in": 130, "out": 1, "hash_ids": [1, 2], "model": "big"},
            {"t": 3.0, "type": "subagent", "agent_id": "x", "requests": [inner]},
            {"t": 9.25, "type": "n", "in": 192, "out": 1, "hash_ids": [1, 2, 3], "model": "big"},
        ],
    } | more


@pytest.mark.parametrize("shape", ["folder", "lines", "printed", "list"])
def test_sessions_are_laid_one_after_another(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "t"
    both = [session("a"), session("b")]
    if shape == "folder":
        path.mkdir()
        for item in both:
            (path / f"{item['id']}.json").write_text(json.dumps(item, indent=1))
    elif shape == "lines":
        written(path, *both)
    elif shape == "list":
        path.write_text(json.dumps(both, indent=1))
    else:
        path.write_text(json.dumps(both[0], indent=1))
        assert [r.timestamp_ms for r in read(path)] == [0, 3500, 9250]
        return
    requests = read(path, session_gap_seconds=5.0, rules=parse_rules(["batch: agent!=null"]))
    assert [r.timestamp_ms for r in requests] == [0, 3500, 5000, 8500, 9250, 14250]
    assert [r.retention_class for r in requests] == ["", "batch", "", "batch", "", ""]
    assert [r.input_tokens for r in requests] == [130, 64, 130, 64, 192, 192]
    # Ids are a session's own: the second one shares nothing with the first.
    assert {first for r in requests[:2] for first, _ in r.runs}.isdisjoint({f for f, _ in requests[2].runs})
    assert requests[0].keys() == requests[4].keys()[:64]


def test_global_ids_are_shared_between_sessions(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", *(session(name, hash_id_scope="global") for name in "ab"))
    requests = read(path, session_gap_seconds=100.0)
    assert requests[0].runs == requests[3].runs


def test_a_bad_request_of_a_session_costs_only_itself(tmp_path: Path) -> None:
    broken = session("a")
    broken["requests"].append({"t": 10, "in": 64})  # type: ignore[attr-defined]
    told: list[tuple[int, str]] = []
    trace = TraceFile(
        written(tmp_path / "t.jsonl", session("0"), broken), complain=lambda *fault: told.append(fault)
    )
    assert len(trace.sorted()) == 6
    assert told == [(2, "request 4: hash_ids is missing")]


def test_packing_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    plain = written(tmp_path / "plain", *MOONCAKE).read_bytes()
    (tmp_path / "a.txt").write_bytes(gzip.compress(plain))
    (tmp_path / "b.gz").write_bytes(zstandard.compress(plain[:50]) + zstandard.compress(plain[50:]))
    for name in ("plain", "a.txt", "b.gz"):
        assert read(tmp_path / name) == WANTED, name


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_file_that_was_cut_is_refused_by_name(tmp_path: Path, pack: object) -> None:
    lines = (json.dumps(MOONCAKE[0] | {"timestamp": i}) + "\n" for i in range(3000))
    whole = pack("".join(lines).encode())  # type: ignore[operator]
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidArgument, match="cut"):
        TraceFile(tmp_path / "cut").sorted()


def test_standard_input_is_read_once_and_as_often_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    content = "".join(json.dumps(line) + "\n" for line in MOONCAKE)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(content.encode()))))
    streams.standard_input.cache_clear()
    assert read(Path("-")) == read(Path("-")) == WANTED
    streams.standard_input.cache_clear()


def test_a_format_can_be_named(tmp_path: Path) -> None:
    line = {"timestamp": 1.5, "input_length": 64, "hash_ids": [1, 2, 3, 4]}
    path = written(tmp_path / "t.jsonl", line)
    assert read(path, form=TraceFormat.BAILIAN) == [TraceRequest(1500, 64, 0, ((1, 4),))]
    assert TraceFile(path, form=TraceFormat.BAILIAN).block_tokens == 16
    with pytest.raises(InvalidArgument, match="--block-size"):
        TraceFile(path, form=TraceFormat.SIMULATOR)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ({"timestamp": 0, "input_length": 1, "hash_ids": [1.5]}, "whole numbers"),
        ({"timestamp": 0, "input_length": 1, "hash_ids": [True]}, "whole numbers"),
        ({"timestamp": 0, "input_length": 1, "hash_ids": [[1], [2]]}, "whole numbers"),
        ({"timestamp": 0, "input_length": 1, "hash_ids": [[1], [2, 3]]}, "inhomogeneous"),
        ({"timestamp": 0, "input_length": 1, "hash_ids": 7}, "must be a list"),
        ({"timestamp": 0, "input_length": None, "hash_ids": [1]}, "input_length is missing"),
        ({"timestamp": float("inf"), "input_length": 1, "hash_ids": [1]}, "infinity"),
        (
            {"timestamp": 0, "input_length": 1, "hash_ids": [1], "block_size": 32},
            "differs from the trace's 64",
        ),
        ({"timestamp": 0, "input_length": 9, "hash_ids": [1], "block_tokens": [4, 5]}, "one a block"),
        ({"timestamp": 0, "input_length": 1, "hash_runs": [[1, 0]]}, "runs not empty"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(tmp_path: Path, line: object, fault: str) -> None:
    told: list[str] = []
    path = written(tmp_path / "t.jsonl", "not even an object", *MOONCAKE, line)
    trace = TraceFile(path, complain=lambda _, said: told.append(said))
    assert trace.sorted() == WANTED
    assert told[0] == "no JSON object"
    assert fault in told[1]


def test_an_id_behind_another_prefix_is_another_block() -> None:
    first, second = TraceRequest(0, 0, 0, ((1, 2),)).keys(), TraceRequest(0, 0, 0, ((5, 1), (2, 1))).keys()
    assert first[32:] != second[32:]
    swapped = TraceRequest(0, 0, 0, ((2, 1), (1, 1), (9, 1))).keys()
    assert swapped[64:] != TraceRequest(0, 0, 0, ((1, 2), (9, 1))).keys()[64:]
