"""The ladder: the store's verbs over host memory and SSD. Decisions under one lock, I/O and news after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvstore.api import (
    NO_SESSION,
    CommitAnswer,
    CommitRequest,
    MatchAnswer,
    MatchRequest,
    OpenAnswer,
    OutcomeRun,
    PrefetchAnswer,
    Progress,
    ReserveAnswer,
    ReserveRequest,
)
from kvstore.core.catalog import NamespaceState
from kvstore.core.frames import Frame
from kvstore.core.leases import OnProgress
from kvstore.core.matching import Found, tier_runs
from kvstore.core.puts import Published
from kvstore.core.recovery import Rebuild
from kvstore.core.retention import Touch
from kvstore.core.sleepers import RunsAsleep
from kvstore.core.sweep import Pause, no_pause
from kvstore.core.views import Views
from kvstore.core.writeback import DurableWait
from kvstore.errors import InvalidArgument, Overloaded
from kvstore.namespace import Namespace, differences, refuse_other_layout
from kvstore.tiers.base import RecoveryReport
from kvstore.types import (
    HASH_BYTES,
    AckTier,
    Fingerprint,
    MatchMode,
    PutOutcome,
    ReleaseOutcome,
    key_count,
)

OnDurable = Callable[[CommitAnswer], None]


class Ladder(Views):
    """Host memory above SSD behind one set of verbs.

    Threads: every verb may be called from any thread and none blocks on I/O, except that a request for frames
    asleep waits for their headers, `Limits.wake_seconds` at most, and a delete for those of all that it may
    concern. Callbacks run outside the lock, on the thread of the verb or of the tier that caused them.
    """

    # Start and namespaces

    def recover(self) -> RecoveryReport | None:
        """Rebuild the index from SSD; call once, before the first verb."""
        if self._ssd is None:
            return None
        ssd = self._ssd
        rebuild = Rebuild(self._catalog, lambda places: ssd.headers(places).result())
        rebuild.collect(ssd.recover())
        found = self._ssd.report()
        with self._decision():
            for namespace in found.namespaces:
                self._catalog.namespaces.setdefault(
                    namespace.fingerprint, NamespaceState(namespace, self._catalog)
                )
            rebuild.run()
            self._catalog.unread.adopt(found.unread)
        if notes := rebuild.corrections():
            ssd.annotate(notes)
        return found

    def open(self, namespace: Namespace, *, root: bytes = b"") -> OpenAnswer:
        """Open a namespace and declare the client's chain root.

        Errors: LayoutMismatch with both sides; InvalidArgument; Overloaded at the limit of namespaces.
        """
        self._admit()
        namespace.checked()
        if root and len(root) != HASH_BYTES:
            raise InvalidArgument(f"open: root must have {HASH_BYTES} bytes, got {len(root)}")
        self._register(namespace)
        with self._decision():
            state = self._catalog.namespaces[namespace.fingerprint]
            if root:
                self._check_roots(state, root)
                state.runs.declare(root)
            return OpenAnswer(fingerprint=namespace.fingerprint, siblings=self._siblings(namespace))

    def _check_roots(self, state: NamespaceState, root: bytes) -> None:
        """Bound what stays for good: one root per tenant secret, so more than a few are a mistake."""
        declared, limit = state.runs.declared, self._limits.roots_max
        if root not in declared and len(declared) >= limit:
            raise Overloaded(f"open: the limit is {limit} chain roots of a namespace, got one more")

    def _register(self, namespace: Namespace) -> None:
        fingerprint = namespace.fingerprint
        with self._lock:
            if fingerprint in self._catalog.namespaces:
                return
            for state in self._catalog.namespaces.values():
                refuse_other_layout(state.namespace, namespace)
            if len(self._catalog.namespaces) >= self._limits.namespaces_max:
                raise Overloaded(f"namespaces: the limit is {self._limits.namespaces_max}")
        if self._ssd is not None:
            self._ssd.register(namespace)
        with self._lock:
            self._catalog.namespaces.setdefault(fingerprint, NamespaceState(namespace, self._catalog))

    def _siblings(self, namespace: Namespace) -> tuple[str, ...]:
        others = (s.namespace for f, s in self._catalog.namespaces.items() if f != namespace.fingerprint)
        same = [
            other for other in others if other.model == namespace.model and other.tenant == namespace.tenant
        ]
        return tuple("; ".join(differences(other, namespace)) for other in same[:8])

    def namespaces(self) -> tuple[Namespace, ...]:
        """Return all open namespaces."""
        with self._lock:
            return tuple(state.namespace for state in self._catalog.namespaces.values())

    def namespace(self, fingerprint: Fingerprint) -> Namespace:
        """Return an open namespace.

        Errors: UnknownNamespace.
        """
        with self._lock:
            return self._catalog.state(fingerprint).namespace

    # Match

    def match(self, request: MatchRequest, on_progress: OnProgress | None = None) -> MatchAnswer:
        """Return the longest stored prefix; with LEASE it is held, and what lies deeper starts to load.

        Errors: InvalidArgument, UnknownNamespace, Overloaded, ShuttingDown.
        """
        self._admit()
        self._check_keys(request.keys)
        while True:
            try:
                return self._match(request, on_progress)
            except RunsAsleep as asleep:
                self._alarm.wait(asleep)

    def _match(self, request: MatchRequest, on_progress: OnProgress | None) -> MatchAnswer:
        with self._decision():
            state = self._catalog.state(request.namespace)
            now = self._retention.now()
            if request.mode is MatchMode.BITMAP:
                bits = self._matcher.presence(state, request.keys, now=now, exact_only=request.exact_only)
                return MatchAnswer(blocks=sum(byte.bit_count() for byte in bits), bitmap=bits)
            if request.mode is MatchMode.PROBE:
                return self._probe(
                    self._matcher.find(state, request.keys, now=now, exact_only=request.exact_only)
                )
            answer = self._lease(state, request, on_progress, now)
        self._reads.run()
        self._writes.run()
        return answer

    @staticmethod
    def _probe(found: Found) -> MatchAnswer:
        tiers = tier_runs(found.items)
        ready = len(tiers) == 0 or all(run.tier == "host" for run in tiers)
        return MatchAnswer(
            blocks=found.blocks, boundaries=found.boundaries, reason=found.reason, tiers=tiers, ready=ready
        )

    def _lease(
        self, state: NamespaceState, request: MatchRequest, on_progress: OnProgress | None, now: float
    ) -> MatchAnswer:
        monotonic = self._clock.monotonic()
        if request.retention_class:
            self._retention.named(request.retention_class)
        earlier = self._leases.frozen(state, request)
        if earlier is not None:
            asked = earlier.asked
            found = Found(earlier.items, earlier.side, earlier.blocks, earlier.boundaries, earlier.reason)
        else:
            found = self._matcher.find(state, request.keys, now=now, exact_only=request.exact_only)
            self._count_lookup(state, request, found)
            asked = self._asked.matched(state, request, found, now=now, monotonic=monotonic)
        if not found.blocks:
            return MatchAnswer(blocks=0, reason=found.reason)
        if earlier is None and self._touch(state, found, request.retention_class, now):
            found = self._matcher.find(state, request.keys, now=now, exact_only=request.exact_only)
        lease = self._leases.grant(state, request, found, asked=asked, earlier=earlier, monotonic=monotonic)
        asked.tiers = lease.tiers
        if request.load:
            self._leases.load(lease)
            self._leases.listen(lease, on_progress)
        return self._leases.answer(lease, monotonic=monotonic)

    def _count_lookup(self, state: NamespaceState, request: MatchRequest, found: Found) -> None:
        events = self._catalog.events
        events.add("kvstore_lookup_tokens_total", key_count(request.keys) * state.namespace.block_tokens)
        events.add("kvstore_lookups_total")
        if found.reason is not None:
            events.add("kvstore_misses_total", reason=str(found.reason))

    def _touch(self, state: NamespaceState, found: Found, by: str, now: float) -> bool:
        """Touch what was found; says whether blocks of it lie in other frames now, cut out to be written."""
        missing: list[Frame] = []
        if found.steps:
            node, used = found.steps[-1]
            if used < node.count:
                state.runs.split(node, used)
            self._catalog.touch_path(node, by=by, now=now, how=Touch.READ)
            missing = self._writeback.enqueue(node)
            self._catalog.join_path(state, node)
        for node in found.loose.values():
            self._catalog.touch_path(node, by=by, now=now, how=Touch.READ)
            self._writeback.enqueue(node)
        for node in {id(item.frame): item.frame.nodes[0] for item in found.side}.values():
            self._catalog.touch_path(node, by="", now=now, how=Touch.READ)
        return bool(missing) and not {item.frame for item in found.items}.issuperset(missing)

    def watch(self, lease: int, on_progress: OnProgress | None = None) -> Progress:
        """Return what is readable under a lease, and later news of what still loads. Any process may
        present the lease.

        Errors: LeaseExpired.
        """
        with self._decision():
            progress = self._leases.watch(lease, on_progress)
        if not progress.done:
            self._reads.run()
        return progress

    def touch(self, namespace: Fingerprint, keys: bytes, *, retention_class: str = "") -> int:
        """Renew a prefix that was used where the store did not see it; returns its visible blocks."""
        self._admit()
        self._check_keys(keys)
        found = self._when_awake(lambda: self._touch_now(namespace, keys, retention_class))
        self._writes.run()
        return found.blocks

    def _touch_now(self, namespace: Fingerprint, keys: bytes, retention_class: str) -> Found:
        with self._decision():
            state = self._catalog.state(namespace)
            if retention_class:
                self._retention.named(retention_class)
            now = self._retention.now()
            found = self._matcher.find(state, keys, now=now, exact_only=False)
            self._touch(state, found, retention_class, now)
            return found

    def renew(self, leases: Sequence[int], *, lease_seconds: float) -> tuple[int, ...]:
        """Move the deadlines of leases; returns those that had ended."""
        with self._decision():
            monotonic = self._clock.monotonic()
            alive = {
                n for n in leases if self._leases.renew(n, lease_seconds=lease_seconds, monotonic=monotonic)
            }
            return tuple(number for number in leases if number not in alive)

    def release(self, lease: int, *, used: int, outcome: ReleaseOutcome = ReleaseOutcome.USED) -> bool:
        """End a lease and count what it delivered; idempotent.

        Nobody waits for a release, so it does a step of the housekeeping that is due. The thread of the tick
        would have to be given the interpreter and the lock first, and whoever has them would wait longer for
        two switches of threads than for the step.
        """
        with self._decision():
            ended = self._leases.release(lease, used=used, outcome=outcome, monotonic=self._clock.monotonic())
        if self._housekeeping.is_due(self._clock.monotonic()):
            self._step(is_lent=True)
        return ended

    # Prefetch

    def prefetch(
        self,
        namespace: Fingerprint,
        keys: bytes,
        *,
        deadline_seconds: float,
        retention_class: str = "",
        session: int = NO_SESSION,
    ) -> PrefetchAnswer:
        """Bring a prefix to host ahead of its fetch, behind all fetches; does not touch it.

        Errors: InvalidArgument, UnknownNamespace, Overloaded.
        """
        self._admit()
        self._check_keys(keys)

        def start() -> PrefetchAnswer:
            with self._decision():
                state = self._catalog.state(namespace)
                if retention_class:
                    self._retention.named(retention_class)
                found = self._matcher.find(state, keys, now=self._retention.now(), exact_only=False)
                return self._prefetches.start(
                    found,
                    deadline_seconds=deadline_seconds,
                    monotonic=self._clock.monotonic(),
                    tenant=state.namespace.tenant,
                    session=session,
                )

        answer = self._when_awake(start)
        self._reads.run()
        return answer

    def prefetch_tenant(self, prefetch: int) -> str | None:
        """Return whose prefetch that is, None when it is over or never was."""
        with self._lock:
            return self._prefetches.tenant(prefetch)

    def cancel(self, prefetch: int) -> bool:
        """Give up a prefetch; idempotent."""
        with self._decision():
            return self._prefetches.cancel(prefetch)

    # Put

    def reserve(self, request: ReserveRequest) -> ReserveAnswer:
        """Hand out slots for the blocks of a put that are absent.

        Errors: InvalidArgument, UnknownNamespace, Overloaded, ShuttingDown.
        """
        self._admit()

        def reserve() -> ReserveAnswer:
            with self._decision():
                state, now = self._catalog.state(request.namespace), self._retention.now()
                return self._putting.reserve(state, request, monotonic=self._clock.monotonic(), now=now)

        answer = self._when_awake(reserve)
        self._writes.run()
        return answer

    def commit(self, request: CommitRequest, on_durable: OnDurable | None = None) -> CommitAnswer | None:
        """Publish what was written. With AckTier.SSD and `on_durable`, returns None and answers when
        durable or refused.

        Errors: InvalidArgument, LeaseExpired.
        """
        with self._decision():
            published = self._putting.commit(request, now=self._retention.now())
            answer: CommitAnswer | None = CommitAnswer(outcomes=published.outcomes)
            waiting = [frame for frame in published.frames if frame.location is None]
            if request.ack is AckTier.SSD and on_durable is not None and waiting:
                DurableWait(
                    waiting, self._plan, lambda durable: on_durable(self._durable(published, durable))
                )
                answer = None
            elif request.ack is AckTier.SSD and published.frames and not waiting:
                answer = self._durable(published, durable=True)
        self._writes.run()
        return answer

    def _durable(self, published: Published, durable: bool) -> CommitAnswer:
        if not durable:
            return CommitAnswer(outcomes=published.outcomes)
        swap = {PutOutcome.STORED_HOST: PutOutcome.STORED_SSD}
        runs = tuple(OutcomeRun(swap.get(run.outcome, run.outcome), run.count) for run in published.outcomes)
        for run in runs:
            if run.outcome is PutOutcome.STORED_SSD:
                self._catalog.events.add("kvstore_stored_blocks_total", run.count, outcome=str(run.outcome))
        return CommitAnswer(outcomes=runs)

    def abort(self, reservation: int) -> bool:
        """Give a reservation back; the writer promises not to touch its slots any more. Idempotent."""
        with self._decision():
            return self._putting.abort(reservation)

    # Life

    def end_session(self, session: int) -> None:
        """A client is gone: its leases and prefetches end, its reservations too, their slots in quarantine
        while it may still write.
        """
        with self._decision():
            self._leases.end_session(session)
            self._prefetches.end_session(session)
            self._putting.end_session(session)

    def tick(self, *, pause: Pause = no_pause) -> None:
        """Do the housekeeping that is due; call about every 100 ms. What takes longer is done in small steps,
        and `pause` is called between them without the lock, to let others have the interpreter; they are left
        to releases as long as those do them.
        """
        with self._decision():
            self._housekeeping.run(monotonic=self._clock.monotonic())
        while self._housekeeping.has_more and not self._housekeeping.is_lent(self._clock.monotonic()):
            pause()
            self._step()
        self._reads.run()
        self._writes.run()
        self._copies.run()

    def _step(self, *, is_lent: bool = False) -> None:
        with self._decision():
            monotonic, now = self._clock.monotonic(), self._retention.now()
            self._housekeeping.step(monotonic=monotonic, now=now, is_lent=is_lent)

    def drain(self, *, deadline_seconds: float) -> bool:
        """Stop admitting and wait until write-behind is done; says whether it was before the deadline."""
        self._draining = True
        end = self._clock.monotonic() + deadline_seconds
        idle = threading.Event()
        while self._clock.monotonic() < end:
            self._writes.run()
            with self._lock:
                if self._writeback.idle:
                    return True
            idle.wait(0.01)
        return False

    def close(self, *, deadline_seconds: float) -> None:
        """Drain and close the SSD tier, both until one deadline."""
        end = self._clock.monotonic() + deadline_seconds
        self.drain(deadline_seconds=deadline_seconds)
        if self._ssd is not None:
            self._ssd.close(deadline_seconds=max(0.0, end - self._clock.monotonic()))
