"""The error table: every exception reaches the other end as itself."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvstore import errors
from kvstore.rpc import status
from kvstore.rpc.v1 import data_pb2 as pb

TRAVELLING = [row.error for row in status.STATUS_TABLE]


class FailedCall(grpc.RpcError):
    """What grpc raises: an error that is a call too."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        self._code, self._details, self._trailing = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing


@pytest.mark.parametrize("kind", TRAVELLING)
def test_an_error_survives_the_wire(kind: type[errors.KVStoreError]) -> None:
    back = status.error_from_wire(pb.Error.FromString(status.error_to_wire(kind("what")).SerializeToString()))
    assert type(back) is kind
    assert str(back) == "what"


@pytest.mark.parametrize("kind", TRAVELLING)
def test_an_error_survives_a_failed_call(kind: type[errors.KVStoreError]) -> None:
    error = kind("what")
    back = status.error_from_call(FailedCall(status.status_of(error), "what", status.error_metadata(error)))
    assert type(back) is kind
    assert str(back) == "what"


def test_every_wire_code_and_every_exception_has_a_row() -> None:
    assert {int(row.code) for row in status.STATUS_TABLE} == set(pb.ErrorCode.values()) - {0}
    ours = {v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.KVStoreError)}
    assert ours - set(TRAVELLING) == {errors.SettingsError}


def test_overload_keeps_its_hint() -> None:
    back = status.error_from_wire(status.error_to_wire(errors.Overloaded("full", retry_after_ms=250)))
    assert isinstance(back, errors.Overloaded)
    assert back.retry_after_ms == 250


def test_a_bug_travels_as_internal_with_its_type() -> None:
    message = status.error_to_wire(ZeroDivisionError("oops"))
    assert message.code == pb.ERROR_CODE_INTERNAL
    assert message.message == "ZeroDivisionError: oops"
    assert type(status.error_from_wire(message)) is errors.KVStoreError


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.TierUnavailable),
        (grpc.StatusCode.CANCELLED, errors.TierUnavailable),
        (grpc.StatusCode.UNAUTHENTICATED, errors.PermissionRefused),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.UNKNOWN, errors.KVStoreError),
    ],
)
def test_a_bare_status_means_something(code: grpc.StatusCode, kind: type[errors.KVStoreError]) -> None:
    back = status.error_from_call(FailedCall(code, "why", None))
    assert type(back) is kind
    assert str(back) == "why"


def test_a_bare_rpc_error_and_an_unknown_code_are_internal() -> None:
    assert type(status.error_from_call(grpc.RpcError("x"))) is errors.KVStoreError
    assert type(status.error_from_wire(pb.Error(code=77))) is errors.KVStoreError  # type: ignore[arg-type]


def test_what_a_stranger_sent_may_be_quoted() -> None:
    message = status.error_to_wire(errors.InvalidArgument("version \ud800 is unknown"))
    assert message.message == "version \\ud800 is unknown"
    assert len(status.error_to_wire(errors.InvalidArgument("x" * 100_000)).message) == 4003
