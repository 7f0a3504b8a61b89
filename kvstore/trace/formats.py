"""What a document of each trace format says. Knows fields, units and defaults; opens nothing.

Sources: Mooncake JSONL (Qin et al., FAST'25); kvcache-simulator JSONL (KVCache.AI); Bailian JSONL (Wang et
al., ATC'25); sessions of kv-cache-tester (Fox, WEKA); `kvstore-runs/1`, Mooncake's fields with runs of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any

import numpy as np

from kvstore.errors import InvalidArgument
from kvstore.trace.blocks import IDS_MAX, Runs, TraceRequest, checked_runs, runs_of
from kvstore.trace.classing import ClassRules

RUNS_FORMAT = "kvstore-runs/1"
NAMED_IDS = 1 << 62
"""Ids that are no plain numbers are numbered from here on."""
Fields = Mapping[str, Any]


class TraceFormat(StrEnum):
    """The formats by name."""

    MOONCAKE = "mooncake"
    SIMULATOR = "kvcache-simulator"
    BAILIAN = "bailian"
    SESSIONS = "kv-cache-tester"
    RUNS = "kvstore-runs"


BLOCK_TOKENS = {TraceFormat.MOONCAKE: 512, TraceFormat.BAILIAN: 16, TraceFormat.SESSIONS: 64}
"""What a format means when nobody says how long a block is; the others have to say it."""


def detect(document: object) -> TraceFormat | None:
    """Return the format that a document is of, None when it is of none.

    Errors: InvalidArgument on runs of an unknown version.
    """
    if not isinstance(document, dict):
        return None
    meta = document.get("_meta")
    if isinstance(meta, dict):
        if meta.get("format") != RUNS_FORMAT:
            raise InvalidArgument(f"format {meta.get('format')!r} is unknown, {RUNS_FORMAT} is")
        return TraceFormat.RUNS
    if isinstance(document.get("requests"), list):
        return TraceFormat.SESSIONS
    if "hash_runs" in document:
        return TraceFormat.RUNS
    if "hash_ids" not in document or "input_length" not in document:
        return None
    if "chat_id" in document or "parent_chat_id" in document:
        return TraceFormat.BAILIAN
    has_weights = "block_tokens" in document or "timestamp" not in document
    return TraceFormat.SIMULATOR if has_weights else TraceFormat.MOONCAKE


def block_tokens_of(form: TraceFormat, document: Fields) -> int:
    """Return how long a block is as a document says, or its format means; 0 when neither does."""
    said = document.get("_meta", document).get("block_size")
    return said if isinstance(said, int) and said > 0 else BLOCK_TOKENS.get(form, 0)


class Parser:
    """Turns the documents of one trace into requests. Remembers ids with names, and sessions."""

    def __init__(
        self, form: TraceFormat, *, block_tokens: int, said: bool, rules: ClassRules, gap_ms: int
    ) -> None:
        self._form = form
        self._block_tokens = 0 if said else block_tokens
        self._rules = rules
        self._gap_ms = gap_ms
        self._names: dict[str, int] = {}
        self._sessions = 0
        self._first_free = 0

    def requests(self, document: Any, fault: Callable[[str], None]) -> Iterator[TraceRequest]:
        """Yield the requests of a document; those of a session that are bad go to `fault`.

        Errors: ValueError saying what is wrong with the document.
        """
        if not isinstance(document, dict):
            raise ValueError("no JSON object")
        if "_meta" in document:
            return
        self._check_block_tokens(document)
        if self._form is TraceFormat.SESSIONS:
            yield from self._session(document, fault)
        else:
            yield self._request(document)

    def _check_block_tokens(self, document: Fields) -> None:
        said = document.get("block_size")
        if self._block_tokens and said is not None and said != self._block_tokens:
            raise ValueError(f"block_size {said!r} differs from the trace's {self._block_tokens}")

    def _request(self, line: Fields) -> TraceRequest:
        runs = (
            checked_runs(line["hash_runs"]) if "hash_runs" in line else self._runs(_field(line, "hash_ids"))
        )
        return TraceRequest(
            timestamp_ms=self._timestamp_ms(line),
            input_tokens=_count(line, "input_length"),
            output_tokens=_count({"output_length": 0, **line}, "output_length"),
            runs=runs,
            retention_class=self._rules.class_of(line),
            weights=_weights(line, sum(count for _, count in runs)),
        )

    def _timestamp_ms(self, line: Fields) -> int:
        match self._form:
            case TraceFormat.BAILIAN:
                return round(1000 * float(_field(line, "timestamp")))
            case TraceFormat.SIMULATOR:
                return int(line.get("timestamp") or 0)
        return int(_field(line, "timestamp"))

    def _runs(self, ids: Any) -> Runs:
        if not isinstance(ids, list) or len(ids) > IDS_MAX:
            raise ValueError(f"hash_ids must be a list of at most {IDS_MAX} ids")
        array = np.asarray(ids or np.zeros(0, np.int64))
        if array.ndim != 1 or array.dtype.kind not in "iuUO":
            raise ValueError("hash_ids must be whole numbers or texts")
        if array.dtype.kind != "i" or (len(array) and not 0 <= array.min() <= array.max() < NAMED_IDS):
            array = np.array([self._number(value) for value in ids], np.int64)
        return runs_of(array.astype(np.int64))

    def _number(self, value: object) -> int:
        """Return the number of an id; `7` and 7 are the same one."""
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError("hash_ids must be whole numbers or texts")
        name = str(value)
        if name.isascii() and name.isdecimal() and int(name) < NAMED_IDS:
            return int(name)
        return self._names.setdefault(name, NAMED_IDS + len(self._names))

    def _session(self, session: Fields, fault: Callable[[str], None]) -> Iterator[TraceRequest]:
        """Flatten a session: sub-agents count from their marker, ids are its own unless said to be global."""
        begins_ms, first = self._sessions * self._gap_ms, self._first_free
        is_global = session.get("hash_id_scope") == "global"
        self._sessions += 1
        for number, (fields, since) in enumerate(_flattened(session, str(session.get("id", ""))), 1):
            try:
                runs = self._runs(_field(fields, "hash_ids"))
                if not is_global:
                    runs = tuple((first + a, n) for a, n in runs)
                    self._first_free = max(self._first_free, *(a + n for a, n in runs), 0)
                yield TraceRequest(
                    timestamp_ms=begins_ms + round(1000 * (since + float(_field(fields, "t")))),
                    input_tokens=_count(fields, "in"),
                    output_tokens=_count({"out": 0, **fields}, "out"),
                    runs=runs,
                    retention_class=self._rules.class_of(fields),
                )
            except (ValueError, TypeError, OverflowError) as error:
                fault(f"request {number}: {error}")


def _flattened(
    session: Fields, name: str, since: float = 0.0, agent: object = None
) -> Iterator[tuple[Fields, float]]:
    """Yield the requests of a session and its sub-agents, each with what its time counts from."""
    for entry in session.get("requests") or ():
        if not isinstance(entry, dict):
            yield {}, since
        elif entry.get("type") == "subagent":
            started = since + float(entry.get("t") or 0)
            yield from _flattened(entry, name, started, entry.get("agent_id") or "subagent")
        else:
            lengths = {"input_length": entry.get("in"), "output_length": entry.get("out")}
            yield {**entry, **lengths, "session_id": name, "agent": agent}, since


def _field(line: Fields, name: str) -> Any:
    if line.get(name) is None:
        raise ValueError(f"{name} is missing")
    return line[name]


def _count(line: Fields, name: str) -> int:
    value = int(_field(line, name))
    if value < 0:
        raise ValueError(f"{name} must be >= 0, got {value}")
    return value


def _weights(line: Fields, blocks: int) -> tuple[int, ...]:
    said = line.get("block_tokens")
    if said is None:
        return ()
    if not isinstance(said, list) or len(said) != blocks or any(int(tokens) < 1 for tokens in said):
        raise ValueError(f"block_tokens must be {blocks} positive numbers, one a block")
    return tuple(int(tokens) for tokens in said)
