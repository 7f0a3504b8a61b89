"""Errors on the wire: one table of exception, Error code and gRPC status; both directions read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import grpc

from kvstore.errors import (
    DataCorrupt,
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    LayoutMismatch,
    LeaseExpired,
    Overloaded,
    PermissionRefused,
    ShuttingDown,
    TierUnavailable,
    UnknownNamespace,
)
from kvstore.rpc.channel import ERROR_METADATA
from kvstore.rpc.v1 import data_pb2 as pb

TEXT_CHARACTERS_MAX = 4000


class StatusRow(NamedTuple):
    """How one kind of error travels."""

    error: type[KVStoreError]
    code: pb.ErrorCode
    status: grpc.StatusCode


# Narrow before wide: the first row whose class fits speaks for an exception. Of rows that share a
# status the first is what a bare status means.
STATUS_TABLE: tuple[StatusRow, ...] = (
    StatusRow(UnknownNamespace, pb.ERROR_CODE_UNKNOWN_NAMESPACE, grpc.StatusCode.NOT_FOUND),
    StatusRow(InvalidArgument, pb.ERROR_CODE_INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
    StatusRow(LayoutMismatch, pb.ERROR_CODE_LAYOUT_MISMATCH, grpc.StatusCode.FAILED_PRECONDITION),
    StatusRow(LeaseExpired, pb.ERROR_CODE_LEASE_EXPIRED, grpc.StatusCode.ABORTED),
    StatusRow(Overloaded, pb.ERROR_CODE_OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    StatusRow(TierUnavailable, pb.ERROR_CODE_TIER_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
    StatusRow(ShuttingDown, pb.ERROR_CODE_SHUTTING_DOWN, grpc.StatusCode.UNAVAILABLE),
    StatusRow(DataCorrupt, pb.ERROR_CODE_DATA_CORRUPT, grpc.StatusCode.DATA_LOSS),
    StatusRow(PermissionRefused, pb.ERROR_CODE_PERMISSION_REFUSED, grpc.StatusCode.PERMISSION_DENIED),
    StatusRow(DeadlineExceeded, pb.ERROR_CODE_DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
    StatusRow(KVStoreError, pb.ERROR_CODE_INTERNAL, grpc.StatusCode.INTERNAL),
)
_INTERNAL = STATUS_TABLE[-1]
_BY_CODE = {int(row.code): row for row in STATUS_TABLE}
_BY_STATUS = {row.status: row for row in reversed(STATUS_TABLE)}
# What gRPC itself says when no servicer was reached.
_BY_STATUS[grpc.StatusCode.UNAUTHENTICATED] = _BY_CODE[int(pb.ERROR_CODE_PERMISSION_REFUSED)]
_BY_STATUS[grpc.StatusCode.CANCELLED] = _BY_CODE[int(pb.ERROR_CODE_TIER_UNAVAILABLE)]


def _row_of(error: BaseException) -> StatusRow:
    return next((row for row in STATUS_TABLE if isinstance(error, row.error)), _INTERNAL)


def error_to_wire(error: BaseException) -> pb.Error:
    """Return the Error message of an exception; what is not ours travels as internal, with its type."""
    row = _row_of(error)
    text = str(error) if isinstance(error, KVStoreError) else f"{type(error).__name__}: {error}"
    after = error.retry_after_ms if isinstance(error, Overloaded) else 0
    return pb.Error(code=row.code, message=_printable(text), retry_after_ms=after)


def _printable(text: str) -> str:
    """Return a text that the wire can carry: what a stranger sent may be quoted in it, surrogates and all."""
    shown = text.encode(errors="backslashreplace").decode()
    return shown if len(shown) <= TEXT_CHARACTERS_MAX else shown[:TEXT_CHARACTERS_MAX] + "..."


def error_from_wire(message: pb.Error) -> KVStoreError:
    """Return the exception of an Error message; an unknown code becomes the root class."""
    return _build(_BY_CODE.get(int(message.code), _INTERNAL), message.message, message.retry_after_ms)


def status_of(error: BaseException) -> grpc.StatusCode:
    """Return the gRPC status that a failed unary or framed call ends with."""
    return _row_of(error).status


def error_metadata(error: BaseException) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata that lets `error_from_call` rebuild the very exception."""
    return ((ERROR_METADATA, error_to_wire(error).SerializeToString()),)


def error_from_call(error: grpc.RpcError) -> KVStoreError:
    """Return the exception of a failed call: the daemon's own if it sent one, else what the status means."""
    trailing = _ask(error, "trailing_metadata") or ()
    for key, value in trailing:  # type: ignore[attr-defined]
        if key == ERROR_METADATA and isinstance(value, bytes):
            return error_from_wire(pb.Error.FromString(value))
    status = _ask(error, "code")
    row = _BY_STATUS.get(status, _INTERNAL) if isinstance(status, grpc.StatusCode) else _INTERNAL
    return _build(row, str(_ask(error, "details") or error), 0)


def _build(row: StatusRow, text: str, retry_after_ms: int) -> KVStoreError:
    if row.error is Overloaded:
        return Overloaded(text, retry_after_ms=retry_after_ms)
    return row.error(text)


def _ask(error: grpc.RpcError, name: str) -> object:
    # grpc raises objects that are RpcError and Call at once; a bare RpcError has no such methods.
    method: Callable[[], object] | None = getattr(error, name, None)
    return method() if callable(method) else None
