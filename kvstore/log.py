"""Log lines for people (key=value) and for programs (JSON): one per state change, repeats limited."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from typing import Any, TextIO

REPEATS_MAX = 10
REPEAT_SECONDS = 60.0
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "repeats_hidden"}


def configure(*, level: str, line_format: str, stream: TextIO | None = None) -> None:
    """Send the package's log to `stream` (stderr by default); replaces an earlier configuration."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonLines() if line_format == "json" else KeyValueLines())
    handler.addFilter(RepeatLimit())
    root = logging.getLogger("kvstore")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return what the caller gave as `extra`, and how many equal lines were left out before this one."""
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    if hidden := getattr(record, "repeats_hidden", 0):
        fields["repeats_hidden"] = hidden
    return fields


class KeyValueLines(logging.Formatter):
    """`2026-01-01T00:00:00.000Z info kvstore.service.daemon recovered blocks=3 seconds=0.1`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and a traceback behind it where there is one."""
        head = f"{_stamp(record)} {record.levelname.lower()} {record.name} {record.getMessage()}"
        tail = "".join(f" {key}={_quoted(value)}" for key, value in fields_of(record).items())
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return head.replace("\n", "\\n") + tail + trace


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        document = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


class RepeatLimit(logging.Filter):
    """Lets a line's template through REPEATS_MAX times per REPEAT_SECONDS; the next tells how many it hid."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._windows: dict[tuple[str, int, str], list[float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether the line is written."""
        key = (record.name, record.levelno, str(record.msg))
        with self._lock:
            window = self._windows.setdefault(key, [record.created, 0])
            if record.created - window[0] >= REPEAT_SECONDS:
                record.repeats_hidden = int(max(0, window[1] - REPEATS_MAX))
                window[:] = [record.created, 0]
            window[1] += 1
            return window[1] <= REPEATS_MAX


def _stamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def _quoted(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    is_plain = text.isprintable() and not any(character in text for character in ' "=')
    return text if is_plain and text else json.dumps(text)
