"""Reading a trace: a file, a folder of sessions or standard input, its format told by its content."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from kvstore.errors import InvalidArgument
from kvstore.trace.blocks import IDS_MAX, TraceRequest
from kvstore.trace.classing import ClassRules
from kvstore.trace.formats import Parser, TraceFormat, block_tokens_of, detect
from kvstore.trace.streams import open_text, size_of

__all__ = ["IDS_MAX", "Complain", "TraceFile", "TraceFormat", "TraceRequest"]

PROGRESS_EVERY = 256
HEAD_LINES = 100
"""A trace whose first lines are bad is still a trace."""
SESSION_GAP_SECONDS = 120.0
Complain = Callable[[int, str], None]
"""Hears of each line that was skipped: its number and what is wrong with it."""


class TraceFile:
    """A trace. `block_tokens` is what the caller says, what the file says, or what its format means.

    Sessions without a common clock start `session_gap_seconds` apart, in the order of their names.
    Errors: InvalidArgument on what cannot be read, or is no trace.
    """

    def __init__(
        self,
        path: Path,
        *,
        block_tokens: int = 0,
        complain: Complain | None = None,
        form: TraceFormat | None = None,
        rules: ClassRules | None = None,
        session_gap_seconds: float = SESSION_GAP_SECONDS,
    ) -> None:
        self.path = path
        self.lines_skipped = 0
        self._done_bytes = 0
        self._complain = complain
        self._rules = rules or ClassRules()
        self._gap_ms = round(1000 * session_gap_seconds)
        self._said = block_tokens > 0
        self.form, found = self._head(form)
        self.block_tokens = block_tokens or found
        if not self.block_tokens:
            raise InvalidArgument(f"trace {path}: it does not say how long a block is; use --block-size")
        if not 1 <= self.block_tokens <= 1 << 20:
            raise InvalidArgument(f"{path}: block size {self.block_tokens} is outside 1..{1 << 20}")

    def _head(self, form: TraceFormat | None) -> tuple[TraceFormat, int]:
        """Return the format and how long a block is, from the first document that tells."""
        try:
            for _, document, _ in islice(self._documents(), HEAD_LINES):
                found = detect(document)
                if found is not None and isinstance(document, dict):
                    return form or found, block_tokens_of(form or found, document)
        except InvalidArgument as error:
            raise InvalidArgument(f"trace {self.path}: {error}") from error
        known = ", ".join(TraceFormat)
        raise InvalidArgument(f"trace {self.path}: none of its first lines is of a known format ({known})")

    def _documents(self) -> Iterator[tuple[int, Any, str]]:
        """Yield each line's number, its JSON, and what is wrong with it where it is none."""
        paths = [self.path]
        if self.path.is_dir():
            paths = sorted(path for path in self.path.iterdir() if path.is_file())
        for number, path in enumerate(paths, 1):
            done = self._done_bytes
            with open_text(path) as (text, position):
                for line, document, fault in _lines(text):
                    self._done_bytes = done + position()
                    yield (number if self.path.is_dir() else line), document, fault

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests in file order; a bad line is reported with its number and skipped."""
        self.lines_skipped = self._done_bytes = 0
        parser = Parser(
            self.form,
            block_tokens=self.block_tokens,
            said=self._said,
            rules=self._rules,
            gap_ms=self._gap_ms,
        )
        for number, document, fault in self._documents():
            if fault:
                self._skip(number, fault)
                continue
            try:
                yield from parser.requests(document, lambda text, at=number: self._skip(at, text))  # type: ignore[misc]
            except (ValueError, TypeError, OverflowError) as error:
                self._skip(number, str(error))

    def _skip(self, number: int, fault: str) -> None:
        self.lines_skipped += 1
        if self._complain is not None:
            self._complain(number, fault)

    @property
    def size_bytes(self) -> int:
        """How much there is to read, packed as it is."""
        return size_of(self.path)

    def sorted(self, on_progress: Callable[[int], None] | None = None) -> list[TraceRequest]:
        """Return the requests by (timestamp, file order); `on_progress` hears of bytes read."""
        requests = []
        for request in self:
            requests.append(request)
            if on_progress is not None and not len(requests) % PROGRESS_EVERY:
                on_progress(self._done_bytes)
        return sorted(requests, key=lambda request: request.timestamp_ms)


def _lines(text: IO[str]) -> Iterator[tuple[int, Any, str]]:
    for number, line in enumerate(text, 1):
        if number == 1 and line.strip() in ("{", "["):
            yield from _whole(line + text.read())
            return
        if line.strip():
            try:
                yield number, json.loads(line), ""
            except ValueError as error:
                yield number, None, f"no JSON: {error}"


def _whole(content: str) -> Iterator[tuple[int, Any, str]]:
    """Yield what a document printed over many lines holds: itself, or the elements of its list."""
    try:
        document = json.loads(content)
    except ValueError as error:
        yield 1, None, f"no JSON: {error}"
        return
    for number, item in enumerate(document if isinstance(document, list) else [document], 1):
        yield number, item, ""
