"""Exceptions are for broken promises; misses, duplicates and throttles are values (kvstore.types)."""

from __future__ import annotations


class KVStoreError(Exception):
    """Root of everything this package raises. The message says what, which, the limit and the value got."""


class InvalidArgument(KVStoreError):
    """The request itself is wrong; repeating it unchanged cannot help."""


class UnknownNamespace(InvalidArgument):
    """No namespace with this fingerprint has been opened on this store."""


class LayoutMismatch(KVStoreError):
    """Same identity, other bytes: refused, with both sides in the message; never reinterpreted."""


class LeaseExpired(KVStoreError):
    """The lease or reservation has ended, or never existed."""


class Overloaded(KVStoreError):
    """A limit is reached; try again after `retry_after_ms`."""

    def __init__(self, message: str, *, retry_after_ms: int = 100) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class TierUnavailable(KVStoreError):
    """A tier, or the daemon itself, cannot be reached or refuses work."""


class DataCorrupt(KVStoreError):
    """Bytes that should be intact are not; raised by offline tools, on the data path it is a miss."""


class ShuttingDown(KVStoreError):
    """The daemon drains; nothing new is admitted."""


class PermissionRefused(KVStoreError):
    """The token or the transport does not allow this."""


class DeadlineExceeded(KVStoreError):
    """The caller's deadline passed before the answer came."""


class SettingsError(KVStoreError):
    """A configuration key is unknown or its value bad; the message names where it came from."""
