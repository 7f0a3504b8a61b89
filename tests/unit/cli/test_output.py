"""Words for sizes and times; JSON that every reader takes; nothing odd in a pipe."""

from __future__ import annotations

import json
import math

import pytest

from kvstore.cli.output import (
    Sheet,
    bytes_text,
    duration_text,
    emit_json,
    percent_text,
    plain,
    progress,
    styled,
    time_text,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 20, "1.5 GiB"), (3 << 40, "3.0 TiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "250 ms"),
        (2.5, "2.5 s"),
        (59, "59 s"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (3 * 86400 + 7200 + 5, "3 d 2 h"),
        (-61, "-1 min 1 s"),
        (math.inf, "never"),
        (None, "never"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


def test_times_are_utc() -> None:
    assert time_text(1_700_000_000.0) == "2023-11-14 22:13:20Z"
    assert time_text(math.inf) == "never"


def test_shares_of_nothing() -> None:
    assert percent_text(1, 4) == "25.0 %"
    assert percent_text(0, 0) == "-"


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"ttl": math.inf, "key": b"\x01\xff", "rows": ({"a": 1},)})
    assert json.loads(capsys.readouterr().out) == {"ttl": None, "key": "01ff", "rows": [{"a": 1}]}


def test_a_pipe_gets_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    page = Sheet()
    page.line("[not markup]")
    page.table("Title", ("name", "count>"), [(styled("[red]", "bold red"), "1"), (plain("[x]"), "2")])
    page.show()
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[not markup]" in shown
    assert "[red]" in shown
    assert not any(line.endswith(" ") for line in shown.splitlines())


def test_no_rows_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    page = Sheet()
    page.table("Title", ("name",), [])
    page.show()
    assert "Title" not in capsys.readouterr().out


def test_a_bar_is_silent_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("working", total=2) as bar:
        bar.to(1, label="still working")
    shown = capsys.readouterr()
    assert shown.out + shown.err == ""
