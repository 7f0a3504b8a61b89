"""Closed sets both ways: each StrEnum of kvstore.types against its protobuf enum, by name."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Generic, TypeVar

from kvstore.errors import InvalidArgument
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import AckTier, MatchMode, MissReason, PutOutcome, ReleaseOutcome, Tier

E = TypeVar("E", bound=StrEnum)


class EnumMap(Generic[E]):
    """One StrEnum and the protobuf enum whose values are `<prefix>_<NAME>`; 0 is UNSPECIFIED on the wire."""

    def __init__(self, kind: type[E], wire: Any, prefix: str) -> None:
        self._to: dict[E, Any] = {member: wire.Value(f"{prefix}_{member.name}") for member in kind}
        self._from: dict[int, E] = {number: member for member, number in self._to.items()}
        self._prefix = prefix

    def to_wire(self, member: E) -> Any:
        """Return the number of a member."""
        return self._to[member]

    def to_wire_optional(self, member: E | None) -> Any:
        """Return the number of a member, 0 for None."""
        return 0 if member is None else self._to[member]

    def from_wire(self, number: int, field: str) -> E:
        """Return the member of a number.

        Errors: InvalidArgument on 0 and on numbers that this build does not know.
        """
        member = self._from.get(number)
        if member is None:
            known = f"{min(self._from)}..{max(self._from)}"
            raise InvalidArgument(f"{field}: {self._prefix} must be one of {known}, got {number}")
        return member

    def from_wire_optional(self, number: int, field: str) -> E | None:
        """Return the member of a number, None for 0.

        Errors: InvalidArgument on numbers that this build does not know.
        """
        return None if number == 0 else self.from_wire(number, field)


MATCH_MODE = EnumMap(MatchMode, pb.MatchMode, "MATCH_MODE")
TIER = EnumMap(Tier, pb.Tier, "TIER")
MISS_REASON = EnumMap(MissReason, pb.MissReason, "MISS_REASON")
PUT_OUTCOME = EnumMap(PutOutcome, pb.PutOutcome, "PUT_OUTCOME")
ACK_TIER = EnumMap(AckTier, pb.AckTier, "ACK_TIER")
RELEASE_OUTCOME = EnumMap(ReleaseOutcome, pb.ReleaseOutcome, "RELEASE_OUTCOME")
