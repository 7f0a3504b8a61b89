"""The one place where errors become misses: the daemon's absence costs a recompute, never a request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    LeaseExpired,
    Overloaded,
    ShuttingDown,
    TierUnavailable,
)
from kvstore.events import Events
from kvstore.types import MissReason

FALLBACKS = "kvstore_client_fallbacks_total"


class BreakerOpen(TierUnavailable):
    """The daemon failed to answer so often that it is not asked."""


# Narrow before wide. What is missing here is a mistake of the caller's, and is raised.
_REASONS: tuple[tuple[type[KVStoreError], MissReason], ...] = (
    (BreakerOpen, MissReason.BREAKER_OPEN),
    (DeadlineExceeded, MissReason.DEADLINE),
    (Overloaded, MissReason.THROTTLED),
    (TierUnavailable, MissReason.DAEMON_GONE),
    (ShuttingDown, MissReason.DAEMON_GONE),
    (LeaseExpired, MissReason.EVICTED),
)


def miss_reason(error: KVStoreError) -> MissReason | None:
    """Return the reason of the miss that an error becomes, None for one that must be raised.

    The root class itself is a failure inside the daemon, or of a kind that only a later one knows.
    """
    if type(error) is KVStoreError:
        return MissReason.TIER_DOWN
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), None)


@contextmanager
def readable(verb: str) -> Iterator[None]:
    """What cannot be read of an answer is the daemon's mistake, or of a later build; not the caller's.

    Errors: TierUnavailable in place of InvalidArgument.
    """
    try:
        yield
    except InvalidArgument as error:
        raise TierUnavailable(f"{verb}: the daemon's answer cannot be read: {error}") from error


def fall_back(error: KVStoreError, events: Events) -> MissReason:
    """Return the reason of the miss, and count it.

    Errors: the error itself when it is no miss.
    """
    reason = miss_reason(error)
    if reason is None:
        raise error
    events.add(FALLBACKS, reason=reason)
    return reason
