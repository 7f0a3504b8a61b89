"""Log lines: both formats, fields, repeats."""

from __future__ import annotations

import io
import json
import logging

from kvstore.log import REPEATS_MAX, RepeatLimit, configure


def written(line_format: str, level: str = "info") -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    configure(level=level, line_format=line_format, stream=stream)
    return logging.getLogger("kvstore.some.part"), stream


def test_key_value_lines() -> None:
    log, stream = written("key=value")
    log.info("segment sealed", extra={"segment": 3, "seconds": 0.12345, "path": "/a b", "empty": ""})
    stamp, level, name, rest = stream.getvalue().rstrip("\n").split(" ", 3)
    assert stamp.endswith("Z")
    assert (level, name) == ("info", "kvstore.some.part")
    assert rest == 'segment sealed segment=3 seconds=0.123 path="/a b" empty=""'


def test_a_line_stays_one_line() -> None:
    log, stream = written("key=value")
    log.info("two\nlines", extra={"text": "a\nb"})
    assert len(stream.getvalue().splitlines()) == 1


def test_json_lines_carry_fields_and_tracebacks() -> None:
    log, stream = written("json")
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("thread failed", extra={"work": "tick"})
    document = json.loads(stream.getvalue())
    assert document["message"] == "thread failed"
    assert document["work"] == "tick"
    assert "ValueError: broken" in document["traceback"]


def test_the_level_holds() -> None:
    log, stream = written("key=value", level="warning")
    log.info("quiet")
    log.warning("loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()


def record(created: float) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "kvstore.a", "levelno": logging.INFO, "msg": "again %d"})
    made.created = created
    return made


def test_repeats_are_limited_and_counted() -> None:
    limit = RepeatLimit()
    passed = [limit.filter(record(100.0 + index / 100)) for index in range(REPEATS_MAX + 7)]
    assert sum(passed) == REPEATS_MAX
    later = record(200.0)
    assert limit.filter(later)
    assert later.repeats_hidden == 7  # type: ignore[attr-defined]
