"""`kvstore serve`: the composition root. Opens everything in order, serves, and closes it in reverse."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvstore import __version__
from kvstore.clock import Clock, SystemClock
from kvstore.core.housekeeping import PAUSE_SECONDS
from kvstore.errors import KVStoreError, TierUnavailable
from kvstore.events import Events
from kvstore.metrics import EventsCollector
from kvstore.service.allocator import keep_large_blocks
from kvstore.service.endpoint import Endpoint
from kvstore.service.gate import Gate, State
from kvstore.service.report import Report, bytes_text
from kvstore.service.serving import Serving, Signals
from kvstore.service.store import Store
from kvstore.service.threads import Supervisor
from kvstore.settings import Loaded, split_address

_log = logging.getLogger(__name__)
TICK_SECONDS = 0.1
LEDGER_SECONDS = 300.0
RECEIPTS_SECONDS = 1.0
EXIT_SECONDS = 5.0
"""Beyond the drain: how long closing may take before the process ends as it is."""
EXIT_UNCLEAN = 1


class Daemon:
    """One daemon's life, from settings to exit code.

    Threads: `run` occupies the main thread with the event loop.
    """

    def __init__(self, loaded: Loaded, *, say: Callable[[str], None], clock: Clock | None = None) -> None:
        self._loaded = loaded
        self._settings = loaded.settings
        self._say = say
        self._clock = clock or SystemClock()
        self._events = Events()
        server = loaded.settings.server
        self._gate = Gate(sessions_max=server.sessions_max, streams_max=server.streams_max)
        self._supervisor = Supervisor(self._events, on_failure=self._thread_failed)
        self._endpoint: Endpoint | None = None
        self._report: Report | None = None
        self._reloading: asyncio.Future[None] | None = None
        self._ready_at = 0.0

    def run(self) -> int:
        """Serve until a signal; returns the exit code.

        Errors: SettingsError, TierUnavailable and other KVStoreError that keep the daemon from starting.
        """
        if not __debug__:
            raise KVStoreError("the daemon checks itself with assertions and does not run under python -O")
        keep_large_blocks()
        return asyncio.run(self._main())

    async def _main(self) -> int:
        asyncio.get_running_loop().set_exception_handler(self._callback_failed)
        signals = Signals()
        self._say(f"kvstore {__version__}, pid {os.getpid()}")
        store = await asyncio.to_thread(Store.open, self._settings, clock=self._clock, events=self._events)
        serving = Serving(store, self._settings, gate=self._gate, about=self._about, clock=self._clock)
        signals.on_hangup = lambda: self._reload(store, serving)
        try:
            recovery = await asyncio.to_thread(store.recover)
            # What a start found lives long: the collector shall not walk it again and again.
            gc.freeze()
            store.ladder.alarm.never_waits = threading.get_ident()
            await serving.start()
            metrics, notes = self._start_metrics(store)
        except BaseException:
            await serving.stop()
            await asyncio.to_thread(store.close, deadline_seconds=1.0)
            raise
        self._supervisor.every("tick", TICK_SECONDS, lambda: store.ladder.tick(pause=self._pause))
        self._supervisor.every("receipts", RECEIPTS_SECONDS, store.administrator.purges.look_after)
        if store.ledger is not None:
            self._supervisor.every("ledger", LEDGER_SECONDS, store.ledger.save)
        self._report = Report(
            version=__version__,
            pid=os.getpid(),
            boot_id=store.boot_id,
            address=self._settings.server.address,
            tcp_address=serving.tcp_address,
            byte_port=serving.byte_port,
            metrics_address=metrics,
            arena=store.arena_text(),
            ssd=store.ssd_text(),
            recovery=recovery,
            notes=(*store.notes(), *notes),
        )
        if not signals.stop.is_set():
            self._ready_at = self._clock.monotonic()
            self._gate.move(State.SERVING)
            for line in self._report.lines():
                self._say(line)
        await signals.stop.wait()
        return await self._end(store, serving, signals)

    async def _end(self, store: Store, serving: Serving, signals: Signals) -> int:
        """Stop admitting, drain, close; a second signal or the deadline ends it as it is."""
        deadline = self._settings.server.drain_seconds
        self._gate.move(State.DRAINING)
        queued = store.queued_bytes()
        last_resort = threading.Timer(
            deadline + EXIT_SECONDS, self._give_up, args=(store, serving, "deadline")
        )
        last_resort.daemon = True
        last_resort.start()
        work = asyncio.ensure_future(self._close_in_order(store, serving, deadline_seconds=deadline))
        hurry = asyncio.ensure_future(signals.hurry.wait())
        await asyncio.wait({work, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            self._give_up(store, serving, "second signal")
        hurry.cancel()
        last_resort.cancel()
        left = await work
        drained = queued - left
        self._say(f"stopped: {bytes_text(max(0, drained))} drained to SSD, {bytes_text(left)} left unwritten")
        return 0

    async def _close_in_order(self, store: Store, serving: Serving, *, deadline_seconds: float) -> int:
        await asyncio.to_thread(store.ladder.drain, deadline_seconds=deadline_seconds)
        left = store.queued_bytes()
        await serving.stop()
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.stop)
        self._supervisor.stop(deadline_seconds=1.0)
        await asyncio.to_thread(store.close, deadline_seconds=EXIT_SECONDS / 2)
        return left

    def _give_up(self, store: Store, serving: Serving, cause: str) -> None:
        # What was acknowledged on SSD is safe: this is no worse than a power cut.
        _log.warning(
            "ended before all was written", extra={"cause": cause, "queued_bytes": store.queued_bytes()}
        )
        self._say(f"stopped at once ({cause}): {bytes_text(store.queued_bytes())} were not written to SSD")
        serving.remove_socket()
        store.abandon()
        os._exit(EXIT_UNCLEAN)

    def _reload(self, store: Store, serving: Serving) -> None:
        serving.reload_tokens()
        self._reloading = asyncio.ensure_future(asyncio.to_thread(store.reload_keys))

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # The loop goes on: what broke here served one client, and its session ends by itself.
        _log.error("callback failed", extra={"cause": context["message"]}, exc_info=context.get("exception"))
        self._events.add("kvstore_thread_failures_total", thread="loop")

    def _thread_failed(self, name: str) -> None:
        self._gate.move(State.FAILED, cause=f"thread {name}")

    def _start_metrics(self, store: Store) -> tuple[str, tuple[str, ...]]:
        """Start the Prometheus endpoint; returns its URL and what there is to note about it."""
        address = self._settings.server.metrics_address
        parsed = split_address(address)
        if parsed is None:
            return "", ()
        classes = [c.name for c in self._settings.retention_classes()]
        collector = EventsCollector(self._events, gauges=lambda: self._gauges(store), classes=classes)
        host, port = parsed
        notes: tuple[str, ...] = ()
        try:
            self._endpoint = Endpoint(collector, host=host, port=port)
        except OSError as error:
            if self._loaded.origins.get("server.metrics_address", "default") != "default":
                raise TierUnavailable(
                    f'server.metrics_address {address}: {error.strerror}; choose another port, or "" for none'
                ) from error
            self._endpoint = Endpoint(collector, host=host, port=0)
            notes = (f"port {port} is taken, metrics moved; set server.metrics_address to choose one",)
        self._endpoint.start(self._supervisor)
        return self._endpoint.url, notes

    def _gauges(self, store: Store) -> Mapping[str, float]:
        return {
            **store.ladder.gauges(),
            "kvstore_sessions": self._gate.sessions,
            "kvstore_serving": float(self._gate.state is State.SERVING),
            "kvstore_uptime_seconds": self._uptime(),
        }

    def _pause(self) -> None:
        self._supervisor.stopping.wait(PAUSE_SECONDS)

    def _uptime(self) -> float:
        return self._clock.monotonic() - self._ready_at if self._ready_at else 0.0

    def _about(self) -> dict[str, Any]:
        report = self._report.plain() if self._report else {}
        settings = {key: value for key, value, _ in self._loaded.rows()}
        mine = {"state": self._gate.state, "uptime_seconds": self._uptime(), "sessions": self._gate.sessions}
        return {**report, **mine, "settings": settings}
