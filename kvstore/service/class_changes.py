"""Changes of retention classes on a running daemon: foreseen, made durable, then in force.

The latest decision wins: a change holds across restarts until the configuration says something else of that
very field than it said when the change was made.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstore.core.administration import Administration
from kvstore.errors import InvalidArgument, SettingsError, TierUnavailable
from kvstore.quantities import parse_seconds
from kvstore.retention import UNDO_SECONDS, ClassChange, ClassTable, RetentionClass
from kvstore.settings import Settings
from kvstore.tiers.fs import FileSystem
from kvstore.tiers.ssd.directory import RETENTION_NAME, read_small, write_durable
from kvstore.types import TtlMode

_log = logging.getLogger(__name__)
VERSION = 1
FIELDS = ("ttl_seconds", "mode", "quota_bytes")
PAUSE_SECONDS = 0.0005


def pause() -> None:
    """Let the event loop have the interpreter in the middle of a long count."""
    time.sleep(PAUSE_SECONDS)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a class was configured as when it was changed, what it was changed to, and when."""

    configured: RetentionClass
    present: RetentionClass
    at: float


@dataclass(frozen=True, slots=True)
class Decisions:
    """What the file of a data directory says: a decision per changed class, and what can still be undone."""

    by_class: Mapping[str, Decision] = field(default_factory=dict)
    changes: tuple[ClassChange, ...] = ()

    def encoded(self) -> bytes:
        """Return the content of the file."""
        document = {
            "version": VERSION,
            "classes": {
                name: {"configured": _plain(d.configured), "present": _plain(d.present), "at": d.at}
                for name, d in self.by_class.items()
            },
            "changes": [
                {"before": _plain(c.before), "after": _plain(c.after), "at": c.at} for c in self.changes
            ],
        }
        return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Merged:
    """Settings with the decisions in force, the origin of each setting that follows one, and which no longer
    hold because the configuration was changed after them.
    """

    settings: Settings
    decisions: Decisions
    origins: Mapping[str, str]
    overruled: tuple[str, ...]


def read_decisions(fs: FileSystem, root: Path) -> Decisions:
    """Return what a data directory says of its classes; nothing where it says nothing.

    Errors: SettingsError on a file that cannot be read, or of a later version; it is left alone.
    """
    path = root / RETENTION_NAME
    try:
        document = json.loads(read_small(fs, path))
        if document["version"] != VERSION:
            raise ValueError(f"version {document['version']} is unknown, this build knows {VERSION}")
        decisions = {
            str(name): Decision(_class(item["configured"]), _class(item["present"]), float(item["at"]))
            for name, item in document["classes"].items()
        }
        changes = [
            ClassChange(_class(c["before"]), _class(c["after"]), float(c["at"])) for c in document["changes"]
        ]
    except FileNotFoundError:
        return Decisions()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "move it away to go back to the configured classes"
        raise SettingsError(f"{path} cannot be read: {error!r}; {remedy}") from error
    return Decisions(decisions, tuple(changes))


def merge(settings: Settings, decisions: Decisions) -> Merged:
    """Apply decisions to configured classes, field by field."""
    configured = {c.name: c for c in settings.retention_classes()}
    classes, origins = dict(settings.classes), dict[str, str]()
    kept, overruled = dict[str, Decision](), list[str]()
    for name, decision in decisions.by_class.items():
        mine = configured.get(name)
        if mine is None:
            overruled.append(
                f"classes.{name} is no longer configured; the change of {_when(decision)} is over"
            )
            continue
        present = mine
        for key in FIELDS:
            decided = getattr(decision.present, key)
            if decided == getattr(decision.configured, key):
                continue
            if getattr(mine, key) != getattr(decision.configured, key):
                overruled.append(
                    f"classes.{name}.{key}: configured anew, so the change of {_when(decision)} is over"
                )
                continue
            present = replace(present, **{key: decided})
            origins[f"classes.{name}.{key}"] = f"kvstore retention set, {_when(decision)}"
        if present != mine:
            kept[name] = Decision(mine, present, decision.at)
            classes[name] = classes[name].model_copy(update=_decided(present))
    merged = settings.model_copy(update={"classes": classes})
    present_now = {c.name: c for c in merged.retention_classes()}
    last = {change.after.name: change.after for change in decisions.changes}
    holding = {
        n for n, after in last.items() if n in present_now and _decided(after) == _decided(present_now[n])
    }
    changes = tuple(
        ClassChange(
            replace(present_now[c.after.name], **_decided(c.before)),
            replace(present_now[c.after.name], **_decided(c.after)),
            c.at,
        )
        for c in decisions.changes
        if c.after.name in holding
    )
    return Merged(merged, Decisions(kept, changes), origins, tuple(overruled))


def _decided(item: RetentionClass) -> dict[str, Any]:
    """Return what can be changed of a class."""
    return {key: getattr(item, key) for key in FIELDS}


class ClassChanges:
    """Changes the classes of one ladder, one change at a time.

    `root` is the data directory that keeps them, None without one. `configured` is what the settings say.
    Threads: any but the event loop; every verb may wait for the disk and walk the index.
    """

    def __init__(
        self,
        ladder: Administration,
        *,
        fs: FileSystem,
        root: Path | None,
        configured: tuple[RetentionClass, ...],
        decisions: Decisions,
    ) -> None:
        self._ladder = ladder
        self._fs = fs
        self._root = root
        self._configured = {c.name: c for c in configured}
        self._decisions = decisions
        self._lock = threading.Lock()

    def document(self) -> dict[str, Any]:
        """Return the classes in force, where each comes from, and what can be undone."""
        sizes = {row["class"]: row for row in self._ladder.status(pause=pause).classes}
        with self._lock:
            table, decisions = self._ladder.class_table(), self._decisions
        now = self._ladder.wall()
        rows = []
        for name, present in table.classes.items():
            decision = decisions.by_class.get(name)
            configured = self._configured.get(name, present)
            row = sizes.get(name, {})
            amounts = {key: row.get(key, 0) for key in ("blocks", "host_bytes", "ssd_bytes")}
            amounts |= {key: row.get(key, 0) for key in ("quota_host_bytes", "quota_ssd_bytes")}
            origin = "configuration" if decision is None else f"kvstore retention set, {_when(decision)}"
            rows.append({**_row(present), **amounts, "origin": origin, "configured": _row(configured)})
        undoable = [
            {
                "class": change.after.name,
                "before": _row(change.before),
                "after": _row(change.after),
                "at": change.at,
                "seconds_left": UNDO_SECONDS - (now - change.at),
            }
            for change in table.recent(now)
        ]
        return {"classes": rows, "undo": undoable, "persisted": self._root is not None}

    def change(
        self,
        name: str,
        *,
        ttl_seconds: float | None,
        mode: str,
        quota_bytes: int | None,
        dry_run: bool,
    ) -> dict[str, Any]:
        """Change a class, or with `dry_run` say what that would do.

        Errors: InvalidArgument; TierUnavailable when it cannot be made durable, then nothing has changed.
        """
        after = self._wanted(name, ttl_seconds, mode, quota_bytes)
        with self._lock:
            table = self._ladder.class_table().changed(after, at=self._ladder.wall())
            return self._take(table, after.name, "set", dry_run=dry_run)

    def undo(self, name: str, *, dry_run: bool) -> dict[str, Any]:
        """Take back the latest change, of any class without a name.

        Errors: as `change`.
        """
        with self._lock:
            before = self._ladder.class_table()
            table = before.undone(name, at=self._ladder.wall())
            changed = next(n for n, c in table.classes.items() if c != before.classes[n])
            return self._take(table, changed, "undo", dry_run=dry_run)

    def _wanted(
        self, name: str, ttl_seconds: float | None, mode: str, quota_bytes: int | None
    ) -> RetentionClass:
        if not name:
            raise InvalidArgument("retention: name a class")
        after = self._ladder.class_table().named(name)
        if ttl_seconds is not None:
            if not ttl_seconds > 0:
                raise InvalidArgument(f"ttl_seconds: must be greater than 0, got {ttl_seconds}")
            after = replace(after, ttl_seconds=ttl_seconds)
        if mode:
            if mode not in tuple(TtlMode):
                raise InvalidArgument(f"mode: one of {', '.join(TtlMode)}, got {mode!r}")
            after = replace(after, mode=TtlMode(mode))
        return after if quota_bytes is None else replace(after, quota_bytes=quota_bytes)

    def _take(self, table: ClassTable, name: str, verb: str, *, dry_run: bool) -> dict[str, Any]:
        before, after = self._ladder.class_table().named(name), table.named(name)
        effect = self._ladder.effect(table, pause=pause)
        document = {
            "class": name,
            "before": _row(before),
            "after": _row(after),
            "hides": asdict(effect.hides),
            "shows": asdict(effect.shows),
            "over_quota": {str(tier): size for tier, size in self._ladder.over_quota(after).items()},
            "applied": not dry_run,
            "persisted": self._root is not None,
        }
        if dry_run:
            return document
        decisions = self._decided(table, name)
        self._keep(decisions)
        self._ladder.adopt(table)
        self._decisions = decisions
        told = {
            f"{key}_{when}": _row(c)[key] for key in FIELDS for when, c in (("was", before), ("is", after))
        }
        hides = effect.hides
        _log.info(
            "retention class changed",
            extra={
                "verb": verb,
                "class": name,
                **told,
                "hides_blocks": hides.blocks,
                "hides_bytes": hides.bytes,
            },
        )
        return {**document, "undo_seconds": UNDO_SECONDS if verb == "set" else 0.0}

    def _decided(self, table: ClassTable, name: str) -> Decisions:
        by_class = {key: d for key, d in self._decisions.by_class.items() if key != name}
        configured, present = self._configured[name], table.named(name)
        if present != configured:
            by_class[name] = Decision(configured, present, self._ladder.wall())
        return Decisions(by_class, table.changes)

    def _keep(self, decisions: Decisions) -> None:
        if self._root is None:
            return
        try:
            save_decisions(self._fs, self._root, decisions)
        except TierUnavailable as error:
            raise TierUnavailable(f"{error}; nothing has changed") from error


def save_decisions(fs: FileSystem, root: Path, decisions: Decisions) -> None:
    """Replace what a data directory says of its classes.

    Errors: TierUnavailable.
    """
    path = root / RETENTION_NAME
    try:
        write_durable(fs, path, content=decisions.encoded())
    except OSError as error:
        raise TierUnavailable(f"{path} cannot be written: {error.strerror or error}") from error


def _when(decision: Decision) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(decision.at))


def _row(item: RetentionClass) -> dict[str, Any]:
    return {
        "class": item.name,
        "ttl_seconds": item.ttl_seconds,
        "mode": str(item.mode),
        "lowest_tier": str(item.lowest_tier),
        "quota_bytes": item.quota_bytes,
        "admission": str(item.admission),
    }


def _plain(item: RetentionClass) -> dict[str, Any]:
    life = item.ttl_seconds if math.isfinite(item.ttl_seconds) else "forever"
    return {"class": item.name, "ttl_seconds": life, "mode": str(item.mode), "quota_bytes": item.quota_bytes}


def _class(document: Mapping[str, Any]) -> RetentionClass:
    """Return a class of which only what can be changed is told."""
    seconds = parse_seconds(document["ttl_seconds"])
    if not seconds > 0:
        raise ValueError(f"ttl_seconds must be greater than 0, got {seconds}")
    mode, quota = TtlMode(document["mode"]), int(document["quota_bytes"])
    return RetentionClass(str(document["class"]), seconds, mode, quota_bytes=quota)
