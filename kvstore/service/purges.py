"""Purges with receipts: what was removed, since when nobody can reach it, and when its bytes were gone.

A receipt is durable before its purge begins and again when it is answered; after a crash between, it says so.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore.core.ladder import Ladder
from kvstore.core.purging import Purge, Target
from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.rpc.packing import fingerprint_of, keys_of, text_of
from kvstore.rpc.v1 import admin_pb2 as pb
from kvstore.service.class_changes import pause
from kvstore.tiers.fs import FileSystem
from kvstore.tiers.ssd.directory import RECEIPTS_NAME, read_small, write_durable
from kvstore.types import HASH_BYTES

_log = logging.getLogger(__name__)
VERSION = 1
RECEIPTS_KEPT = 256
DURABLE_SECONDS = 30.0
"""So long an answer waits for the disk; after that the receipt says that it is not durable yet."""
LOOK_SECONDS = 0.02
Receipt = dict[str, Any]


class Purges:
    """The purges of one ladder and their receipts; one purge at a time.

    `root` is the data directory that keeps receipts, None without one; `new_id` names them.
    Threads: any but the event loop.
    """

    def __init__(
        self, ladder: Ladder, *, fs: FileSystem, root: Path | None, new_id: Callable[[], str]
    ) -> None:
        self._ladder = ladder
        self._fs = fs
        self._path = None if root is None else root / RECEIPTS_NAME
        self._new_id = new_id
        self._receipts: OrderedDict[str, Receipt] = OrderedDict()
        self._open: dict[str, Purge] = {}
        self._one_at_a_time = threading.Lock()
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read the receipts of earlier runs: what was in host memory went with them."""
        if self._path is None:
            return
        try:
            document = json.loads(read_small(self._fs, self._path))
            if document["version"] != VERSION:
                raise ValueError(f"version {document['version']} is unknown, this build knows {VERSION}")
            receipts = [dict(receipt) for receipt in document["receipts"]]
            self._receipts = OrderedDict((str(receipt["id"]), receipt) for receipt in receipts)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            # Receipts are words about what is done: nothing depends on them, and the file is left alone.
            _log.warning("receipts cannot be read", extra={"path": self._path, "cause": repr(error)})
            self._path = None
            return
        for receipt in self._receipts.values():
            _after_restart(receipt, at=self._ladder.wall())

    def purge(self, request: pb.PurgeRequest) -> Receipt:
        """Purge, or with `dry_run` say what that would remove.

        Errors: InvalidArgument, UnknownNamespace; TierUnavailable when the receipt cannot be kept, then
        nothing was removed.
        """
        target, what = self._target(request)
        if request.dry_run:
            amount = self._ladder.foresee_purge(target, pause=pause)
            return {"what": what, "applied": False, **asdict(amount)}
        with self._one_at_a_time:
            receipt: Receipt = {"id": self._new_id(), "what": what, "state": "running"}
            receipt["started_at"] = self._ladder.wall()
            self._add(receipt)
            purge = self._ladder.purge(target, pause=pause)
            self._open[receipt["id"]] = purge
            end = time.monotonic() + DURABLE_SECONDS
            while not purge.is_durable and time.monotonic() < end:
                time.sleep(LOOK_SECONDS)
                self._ladder.look_after(purge)
            self._bring_up_to_date()
        _log.info("purged", extra={**receipt["what"], "receipt": receipt["id"], "blocks": receipt["blocks"]})
        return {**receipt, "applied": True}

    def receipts(self, wanted: str) -> dict[str, Any]:
        """Return one receipt or all, the newest first.

        Errors: InvalidArgument when there is none of that id.
        """
        self._bring_up_to_date()
        with self._lock:
            found = [dict(receipt) for receipt in reversed(self._receipts.values())]
        if wanted:
            found = [receipt for receipt in found if receipt["id"] == wanted]
            if not found:
                raise InvalidArgument(f"purge: no receipt {wanted!r}; the latest {RECEIPTS_KEPT} are kept")
        return {"receipts": found}

    def look_after(self) -> None:
        """Bring receipts up to date while bytes of purges are still on their way out; cheap when none are."""
        if self._open:
            self._bring_up_to_date()

    def _target(self, request: pb.PurgeRequest) -> tuple[Target, dict[str, Any]]:
        tenant = request.tenant if request.HasField("tenant") else None
        name = text_of(request.retention_class, "purge.retention_class")
        if sum((bool(request.namespace), tenant is not None, bool(name))) != 1:
            raise InvalidArgument("purge: name exactly one of a namespace, a tenant or a class")
        if tenant is not None:
            return Target(tenant=text_of(tenant, "purge.tenant")), {"tenant": tenant}
        if name:
            return Target(retention_class=self._ladder.class_table().named(name).name), {"class": name}
        space = fingerprint_of(request.namespace, "purge.namespace")
        what = {"namespace": space.hex(), "model": self._ladder.namespace(space).model}
        keys = keys_of(request.keys, "purge.keys") if request.keys else b""
        if request.hash_prefix:
            keys = self._whole(space, request.hash_prefix)
        if keys:
            what["last_block"] = keys[-HASH_BYTES:].hex()
        return Target(namespace=space, keys=keys), what

    def _whole(self, space: bytes, prefix: bytes) -> bytes:
        """Return the one hash of a namespace that starts so.

        Errors: InvalidArgument when it is none, or several.
        """
        if len(prefix) == HASH_BYTES:
            return prefix
        if len(prefix) > HASH_BYTES:
            raise InvalidArgument(f"purge.hash_prefix: at most {HASH_BYTES} bytes, got {len(prefix)}")
        found = {key for where, key, _ in self._ladder.present(prefix, pause=pause) if where == space}
        if len(found) != 1:
            raise InvalidArgument(
                f"purge: {len(found)} blocks of this namespace start with {prefix.hex()}; it must be one"
            )
        return found.pop()

    def _add(self, receipt: Receipt) -> None:
        with self._lock:
            self._receipts[receipt["id"]] = receipt
            while len(self._receipts) > RECEIPTS_KEPT:
                self._receipts.popitem(last=False)
            try:
                self._save()
            except OSError as error:
                del self._receipts[receipt["id"]]
                raise TierUnavailable(
                    f"{self._path} cannot be written: {error.strerror or error}; nothing was removed"
                ) from error

    def _bring_up_to_date(self) -> None:
        with self._lock:
            changed = False
            for key, purge in list(self._open.items()):
                self._ladder.look_after(purge)
                receipt = self._receipts.get(key, {})
                before = dict(receipt)
                receipt.update(_facts(purge))
                changed |= receipt != before
                if purge.gone_at is not None:
                    del self._open[key]
            if changed:
                try:
                    self._save()
                except OSError as error:
                    _log.warning("receipts not written", extra={"path": self._path, "cause": str(error)})

    def _save(self) -> None:
        if self._path is not None:
            document = {"version": VERSION, "receipts": list(self._receipts.values())}
            write_durable(self._fs, self._path, content=json.dumps(document, indent=1).encode() + b"\n")


def _facts(purge: Purge) -> Receipt:
    done = "gone" if purge.gone_at is not None else "leaving" if purge.is_durable else "not durable yet"
    return {
        "state": done,
        **asdict(purge.amount),
        "also_blocks": purge.also_blocks,
        "unreachable_since": purge.unreachable_since,
        "durable": purge.is_durable,
        "ssd_bytes": purge.ssd_bytes,
        "leased_bytes": purge.leased_bytes,
        "writing_bytes": purge.writing_bytes,
        "gone_at": purge.gone_at,
    }


def _after_restart(receipt: Receipt, *, at: float) -> None:
    """What leases held in host memory is gone with the process; what was not durable may have come back."""
    if receipt["state"] == "leaving":
        receipt.update(state="gone", gone_at=at, leased_bytes=0)
    elif receipt["state"] != "gone":
        receipt["state"] = "interrupted: purge again"
