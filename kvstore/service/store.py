"""What the daemon owns below its listeners: directory lock, arena, client locks, SSD tier and ladder."""

from __future__ import annotations

import gc
import hashlib
import logging
import secrets
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.api import NO_SESSION
from kvstore.clock import Clock
from kvstore.core.eviction import POLICIES
from kvstore.core.ladder import Ladder
from kvstore.core.limits import Limits
from kvstore.errors import KVStoreError, SettingsError, TierUnavailable
from kvstore.events import Events
from kvstore.locks import ClientLocks
from kvstore.machine import Machine, Mount
from kvstore.retention import ClassTable
from kvstore.service.administrator import Administrator
from kvstore.service.class_changes import (
    ClassChanges,
    Decisions,
    Merged,
    merge,
    pause,
    read_decisions,
    save_decisions,
)
from kvstore.service.ledger_file import LedgerFile
from kvstore.service.listen import prepare_socket
from kvstore.service.purges import Purges
from kvstore.service.report import bytes_text
from kvstore.settings import (
    SEGMENTS_MIN,
    EncryptionSettings,
    HostSettings,
    ServerSettings,
    Settings,
    SsdSettings,
    has_keys,
)
from kvstore.tiers.base import RecoveryReport
from kvstore.tiers.fs import FileSystem, OsFileSystem
from kvstore.tiers.host import HostArena, default_arena_bytes, remove_leftovers
from kvstore.tiers.ssd import DirectoryLock, SsdTier
from kvstore.tiers.ssd.crypto_keys import KeyRing, read_table

_log = logging.getLogger(__name__)
AUTO_CAPACITY_SHARE = 0.8
"""`ssd.capacity_bytes = "auto"`: this much of what the disk could give, what is stored already included."""
SEGMENTS_FOLDER = "segments"


@dataclass(slots=True, kw_only=True)
class Store:
    """The open store.

    Threads: `open`, `recover` and `close` block on disk and memory: never on the event loop.
    """

    ladder: Ladder
    arena: HostArena
    locks: ClientLocks
    ssd: SsdTier | None
    keys: KeyRing | None
    socket: Path
    boot_id: int
    events: Events
    settings: Settings
    administrator: Administrator
    merged: Merged
    ledger: LedgerFile | None
    _stack: ExitStack

    @staticmethod
    def open(settings: Settings, *, clock: Clock, events: Events) -> Store:
        """Take the data directory and the socket's name, then create and open everything; undone on failure.

        Errors: TierUnavailable, InvalidArgument: what is in the way, and the setting that helps.
        """
        boot_id = secrets.randbits(64) or 1
        fs = OsFileSystem()
        with ExitStack() as stack:
            if settings.ssd.enabled:
                stack.callback(DirectoryLock(settings.ssd.path).release)
            merged = _merged(settings, fs)
            configured, settings = settings.retention_classes(), merged.settings
            socket = prepare_socket(settings.server)
            owner = settings.ssd.path if settings.ssd.enabled else socket
            arena = _create_arena(settings.host, boot_id=boot_id, owner=owner)
            stack.callback(arena.close)
            locks = _create_locks(socket, settings.host)
            stack.callback(locks.close)
            capacity = _capacity(settings.ssd, fs) if settings.ssd.enabled else 0
            keys = open_keys(settings.encryption) if settings.ssd.enabled else None
            ssd = _open_ssd(settings.ssd, fs, clock, events, capacity, keys) if settings.ssd.enabled else None
            ladder = Ladder(
                host=arena,
                ssd=ssd,
                clock=clock,
                events=events,
                classes=ClassTable.of(settings.retention_classes(), changes=merged.decisions.changes),
                limits=_limits(settings.server, settings.ssd, capacity),
                policy=POLICIES[settings.host.eviction](),
                client_alive=lambda session: _may_write(locks, session),
                new_number=lambda: secrets.randbits(63) | 1,
            )
            root = settings.ssd.path if settings.ssd.enabled else None
            classes = ClassChanges(
                ladder, fs=fs, root=root, configured=configured, decisions=merged.decisions
            )
            purges = Purges(ladder, fs=fs, root=root, new_id=lambda: secrets.token_hex(6))
            return Store(
                ladder=ladder,
                administrator=Administrator(ladder, classes=classes, purges=purges),
                merged=merged,
                ledger=LedgerFile(ladder, fs=fs, root=root) if root is not None else None,
                arena=arena,
                locks=locks,
                ssd=ssd,
                keys=keys,
                socket=socket,
                boot_id=boot_id,
                events=events,
                settings=settings,
                _stack=stack.pop_all(),
            )

    def recover(self) -> RecoveryReport | None:
        """Find what was stored before, and begin to touch the arena."""
        gc.disable()  # millions of objects are made, and none of them is garbage
        try:
            report = self.ladder.recover()
        finally:
            gc.enable()
        if report is not None:
            fields = {"blocks": report.blocks, "frames": report.frames, "dropped": report.frames_dropped}
            _log.info("recovered", extra={**fields, "rebuilt": report.rebuilt, "seconds": report.seconds})
            if self.ledger is not None:
                self.ledger.load(is_new_store=not report.frames)
            self.administrator.purges.load()
        self.arena.start_prefault(self._prefault_failed)
        return report

    def reload_keys(self) -> None:
        """Read the keys again and forget whose key was shredded, in host memory too; an error keeps the old.

        Threads: never on the event loop.
        """
        if self.keys is None:
            return
        try:
            found = self.keys.reload()
        except SettingsError as error:
            self.events.add("kvstore_key_reload_failures_total")
            _log.error("keys not reloaded", extra={"cause": str(error)})
            return
        forgotten = 0
        for namespace in self.ladder.namespaces():
            if self.keys.owner_of(namespace.tenant) in found.shredded:
                forgotten += self.ladder.delete(namespace.fingerprint, None, pause=pause)
        _log.info(
            "keys reloaded", extra={"added": found.added, "gone": found.gone, "blocks_forgotten": forgotten}
        )

    def _prefault_failed(self, error: BaseException) -> None:
        # Logged where it happened. Untouched memory is slower at its first use, not wrong.
        self.events.add("kvstore_thread_failures_total", thread="prefault")

    def queued_bytes(self) -> int:
        """Return how much waits for the SSD."""
        return int(self.ladder.gauges()["kvstore_write_queue_bytes"])

    def close(self, *, deadline_seconds: float) -> None:
        """Seal and sync the SSD tier, remove arena and lock file, let the directory go."""
        try:
            self.ladder.close(deadline_seconds=deadline_seconds)
            if self.ledger is not None and self.ssd is not None and self.ssd.healthy().writable:
                self.ledger.close()
        finally:
            self._stack.close()

    def abandon(self) -> None:
        """Remove what would be left behind in shared memory; the process ends without closing anything."""
        for path in (self.arena.path, self.locks.path):
            with suppress(OSError):
                path.unlink()

    def arena_text(self) -> str:
        """Return size, place and kind of the arena in words."""
        facts = self.arena.facts()
        huge = "" if facts.huge_pages in ("never", "advise") else f", huge pages {facts.huge_pages}"
        return f"{bytes_text(facts.total_bytes)} on {facts.mount_point} ({facts.mount_kind}{huge})"

    def ssd_text(self) -> str:
        """Return path, limit and kind of the data directory in words."""
        if self.ssd is None:
            return "off: nothing survives a restart"
        usage, health = self.ssd.usage(), self.ssd.healthy()
        used = f"{bytes_text(usage.used_bytes)} of {bytes_text(usage.capacity_bytes)} used"
        state = health.detail or ("direct I/O" if health.writable else "read-only")
        secret = ", encrypted" if self.keys is not None and self.keys.encrypts else ""
        free = f"{bytes_text(usage.free_bytes)} free on the disk"
        return f"{self.settings.ssd.path}, {used}, {free}, {state}{secret}"

    def notes(self) -> tuple[str, ...]:
        """Return what an operator could do better."""
        found = [self.arena.facts().advice, *self.merged.overruled]
        found += [f"{key} follows `{origin}`" for key, origin in self.merged.origins.items()]
        if self.ssd is not None:
            usage, least = self.ssd.usage(), self.settings.ssd.min_free_bytes
            room = usage.used_bytes + max(0, usage.free_bytes - least)
            if usage.capacity_bytes > room:
                allowed = f"{bytes_text(usage.capacity_bytes)} allowed ({bytes_text(least)} stay free)"
                found.append(f"the disk has room for {bytes_text(room)} of the {allowed}")
        return tuple(note for note in found if note)


def _merged(settings: Settings, fs: FileSystem) -> Merged:
    """Return the settings with what was decided about classes while an earlier daemon ran."""
    if not settings.ssd.enabled:
        return merge(settings, Decisions())
    merged = merge(settings, read_decisions(fs, settings.ssd.path))
    if merged.overruled:
        save_decisions(fs, settings.ssd.path, merged.decisions)
    return merged


def _create_arena(host: HostSettings, *, boot_id: int, owner: Path) -> HostArena:
    size = host.arena_bytes
    try:
        remove_leftovers(host.directory, owner_tag(owner))
        if size == "auto":
            size = default_arena_bytes(Machine.read(), Mount.of(host.directory))
        return HostArena.create(
            host.directory,
            total_bytes=size,
            arena_id=secrets.randbits(64) or 1,
            boot_id=boot_id,
            owner=owner_tag(owner),
            mode=host.mode,
            group=host.group or None,
        )
    except OSError as error:
        raise TierUnavailable(f"host.directory {host.directory}: {error.strerror}") from error
    except KVStoreError as error:
        raise type(error)(f"{error} (settings: host.arena_bytes, host.directory)") from error


def owner_tag(path: Path) -> bytes:
    """Return what marks an arena as that of the daemon of a data directory, or of a socket if it has none."""
    return hashlib.blake2b(str(path.absolute()).encode(), digest_size=32).digest()


def _may_write(locks: ClientLocks, session: int) -> bool:
    """Say whether a writer may still write; for a token that is the daemon, which gives back by itself."""
    return session < NO_SESSION or locks.is_held(session)


def _create_locks(socket: Path, host: HostSettings) -> ClientLocks:
    return ClientLocks(socket.with_name(socket.name + ".clients"), mode=host.mode, group=host.group or None)


def _capacity(ssd: SsdSettings, fs: FileSystem) -> int:
    """Return the limit in bytes; `auto` is judged by what the disk has free now.

    Errors: TierUnavailable when not even SEGMENTS_MIN segments fit.
    """
    if ssd.capacity_bytes != "auto":
        return ssd.capacity_bytes
    stored = _stored_bytes(ssd.path / SEGMENTS_FOLDER)
    free = fs.free_bytes(ssd.path)
    capacity = int((stored + max(0, free - ssd.min_free_bytes)) * AUTO_CAPACITY_SHARE)
    if capacity < SEGMENTS_MIN * ssd.segment_bytes:
        raise TierUnavailable(
            f"data directory {ssd.path}: the disk has {bytes_text(free)} free, of which "
            f"{bytes_text(ssd.min_free_bytes)} are left alone, and {SEGMENTS_MIN} segments of "
            f"{bytes_text(ssd.segment_bytes)} must fit: free some, choose another ssd.path, set "
            "ssd.min_free_bytes or ssd.segment_bytes lower, or ssd.enabled = false"
        )
    return capacity


def _stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.seg")) if folder.is_dir() else 0


def open_keys(encryption: EncryptionSettings) -> KeyRing | None:
    """Return the keys at hand, None where no source of keys is set.

    Errors: SettingsError.
    """
    if not has_keys(encryption):
        return None
    file, command = encryption.key_file, encryption.key_command or ()
    return KeyRing(
        lambda: read_table(key_file=file, key_command=command),
        encrypts=encryption.enabled,
        shares_default=encryption.unlisted_tenants == "default_key",
    )


def _open_ssd(
    ssd: SsdSettings, fs: FileSystem, clock: Clock, events: Events, capacity: int, keys: KeyRing | None
) -> SsdTier:
    return SsdTier(
        ssd.path,
        fs=fs,
        clock=clock,
        events=events,
        capacity_bytes=capacity,
        min_free_bytes=ssd.min_free_bytes,
        queue_bytes_max=ssd.write_queue_bytes,
        segment_bytes_max=ssd.segment_bytes,
        scrub_bytes_per_second=ssd.scrub_bytes_per_second,
        keys=keys,
    )


def _limits(server: ServerSettings, ssd: SsdSettings, capacity: int) -> Limits:
    """Return the core's limits: it evicts before the tier has to refuse, for segments take time to go."""
    margin = min(2 * ssd.segment_bytes, capacity // 4)
    return Limits(
        write_queue_bytes_max=ssd.write_queue_bytes,
        ssd_capacity_bytes=capacity - margin,
        session_leases_max=server.session_leases_max,
        session_reservations_max=server.session_reservations_max,
        session_reserved_share=server.session_arena_percent / 100,
        session_loads_max=server.session_loads_max,
        session_prefetches_max=server.session_prefetches_max,
    )
