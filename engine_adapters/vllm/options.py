"""What a user may say: to the engine in kv_connector_extra_config, per request in kv_transfer_params."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.client import ClientLimits
from kvstore.errors import InvalidArgument
from kvstore.retention import DEFAULT_CLASS

REQUEST_KEY = "kvstore"
"""Where a request's own wishes stand in its kv_transfer_params."""
LOADER_THREADS = 2
"""Of each rank. Loads that wait for SSD must not hold up one from host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One engine's settings.

    `weights` names the weights by an immutable version instead of a digest of their files. `save_decode` also
    stores blocks that hold generated tokens. `load_async` lets other requests run while one loads. A load is
    given up after `fetch_seconds`, or when computing would have been as fast, but not before
    `fetch_seconds_min`; what is known to take longer is not loaded at all. How fast the engine computes is
    measured, unless `prefill_tokens_per_second` says it. `staging_bytes` is host memory of each copying
    thread. At most `save_queue_blocks` wait to be copied out, 0: a quarter of the engine's blocks.
    """

    address: str = ""
    model: str = ""
    weights: str = ""
    tenant: str = ""
    retention_class: str = DEFAULT_CLASS
    load: bool = True
    save: bool = True
    save_decode: bool = False
    load_async: bool = True
    match_seconds: float = 0.020
    fetch_seconds: float = 2.0
    fetch_seconds_min: float = 0.05
    prefill_tokens_per_second: float = 0.0
    put_seconds: float = 5.0
    flush_seconds: float = 2.0
    staging_bytes: int = 64 << 20
    save_queue_blocks: int = 0

    @property
    def limits(self) -> ClientLimits:
        """The client's limits: who may wait longer for an answer may wait as long for the connection."""
        usual = ClientLimits()
        return dataclasses.replace(usual, connect_seconds=max(usual.connect_seconds, self.match_seconds))

    @staticmethod
    def parse(given: Mapping[str, Any]) -> Options:
        """Read kv_connector_extra_config.

        Errors: InvalidArgument naming the key, what it takes and what it got.
        """
        return Options(**_checked(Options, given, where="kv_connector_extra_config"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """One request's own: its retention class ("" for the engine's), and what it wants none of."""

    retention_class: str = ""
    load: bool = True
    save: bool = True
    save_decode: bool = True

    @staticmethod
    def parse(params: Mapping[str, Any] | None) -> Wishes:
        """Read the part of kv_transfer_params that is meant for the store; other connectors' keys are theirs.

        Errors: InvalidArgument as `Options.parse`.
        """
        given = (params or {}).get(REQUEST_KEY) or {}
        if not isinstance(given, Mapping):
            raise InvalidArgument(
                f"kv_transfer_params[{REQUEST_KEY!r}]: expected an object, got {given!r:.80}"
            )
        return Wishes(**_checked(Wishes, given, where=f"kv_transfer_params[{REQUEST_KEY!r}]"))


def _checked(kind: type[Any], given: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    fields = {field.name: type(field.default) for field in dataclasses.fields(kind)}
    for key, value in given.items():
        if key not in fields:
            raise InvalidArgument(f"{where}: unknown key {key!r}; known are {', '.join(sorted(fields))}")
        wanted = fields[key]
        is_number = wanted is float and type(value) is int
        if type(value) is not wanted and not is_number:
            raise InvalidArgument(f"{where}: {key} takes a {wanted.__name__}, got {value!r:.80}")
        if wanted in (int, float) and value < 0:
            raise InvalidArgument(f"{where}: {key} must not be negative, got {value!r:.80}")
    return dict(given)
