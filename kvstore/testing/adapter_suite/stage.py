"""Engines in front of a daemon that is tried: what they are asked, and what always holds of their answers."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from kvstore.testing.adapter_suite.daemon import SETTLE_SECONDS, TriedDaemon, eventually
from kvstore.testing.adapter_suite.harness import Answer, Engine
from kvstore.types import MissReason

Ends = list[Answer | Exception]
"""What became of a request: nothing yet, or one thing."""
Asked = tuple[threading.Thread, Ends]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the prompts of a suite look like, and how long it waits.

    `full_hit_tokens` is what a prompt of `prompt_tokens` hits at most: full blocks, less what the adapter
    leaves to compute. Engines are started with `patience_seconds`, the wait for the store that their
    adapter is told to allow; where a fault lasts, with `short_patience_seconds`. Nothing judges speed: an
    answer, or a client's way back to its daemon, may take `answer_seconds_max`, and giving back what is held
    `settle_seconds`.
    """

    vocabulary: int
    prompt_tokens: int
    block_tokens: int
    full_hit_tokens: int
    new_tokens: int = 8
    arena_bytes: int = 64 << 20
    patience_seconds: float = 10.0
    short_patience_seconds: float = 1.0
    answer_seconds_max: float = 60.0
    settle_seconds: float = SETTLE_SECONDS


class StartEngine(Protocol):
    """Starts an engine; see AdapterSuite.start_engine."""

    def __call__(self, address: str | None, *, patience_seconds: float, other_model: bool) -> Engine: ...


class Stage:
    """Engines of one kind and a daemon; a context manager that ends the engines.

    `reuses_engines` keeps them from one scenario to the next.
    """

    def __init__(
        self, daemon: TriedDaemon, start_engine: StartEngine, sizes: Sizes, *, reuses_engines: bool = False
    ) -> None:
        self.daemon = daemon
        self.sizes = sizes
        self._start_engine = start_engine
        self._reuses_engines = reuses_engines
        self._kept: dict[tuple[object, ...], Engine] = {}
        self._references: dict[tuple[str, bool], tuple[int, ...]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self._kept.values():
            engine.close()

    @contextlib.contextmanager
    def engine(
        self,
        *,
        address: str | None = None,
        patience_seconds: float | None = None,
        other_model: bool = False,
        fresh: bool = False,
    ) -> Iterator[Engine]:
        """Lend an engine behind the tap: a new process, or a kept one where the suite reuses them."""
        patience = self.sizes.patience_seconds if patience_seconds is None else patience_seconds
        address = address or self.daemon.tap.address
        if self._reuses_engines and not fresh:
            kept = self._keep(address, patience, other_model=other_model)
            if not other_model:
                self.hits_again(kept, "connected")  # a fault before may have cut it off
            yield kept
            return
        engine = self._start_engine(address, patience_seconds=patience, other_model=other_model)
        try:
            yield engine
        finally:
            engine.close()

    def impatient(self) -> contextlib.AbstractContextManager[Engine]:
        """Lend an engine that waits briefly: for faults that last."""
        return self.engine(patience_seconds=self.sizes.short_patience_seconds)

    def _keep(self, address: str | None, patience_seconds: float, *, other_model: bool) -> Engine:
        key = (address, patience_seconds, other_model)
        if key not in self._kept:
            self._kept[key] = self._start_engine(
                address, patience_seconds=patience_seconds, other_model=other_model
            )
        return self._kept[key]

    def prompt(self, name: str) -> list[int]:
        """Return the prompt of that name: random ids, the same for the same name."""
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
        ids = random.Random(seed)
        return [ids.randrange(self.sizes.vocabulary) for _ in range(self.sizes.prompt_tokens)]

    def reference(self, name: str, *, other_model: bool = False) -> tuple[int, ...]:
        """Return what the engine answers without any store."""
        key = (name, other_model)
        if key not in self._references:
            engine = self._keep(None, self.sizes.patience_seconds, other_model=other_model)
            self._references[key] = self._ended(self.asked(engine, name), name).ids
        return self._references[key]

    def ask(self, engine: Engine, name: str, *, other_model: bool = False) -> Answer:
        """Let an engine answer, and check what holds whatever happens."""
        return self.checked(self.asked(engine, name), name, other_model=other_model)

    def asked(self, engine: Engine, name: str) -> Asked:
        """Let an engine answer on a thread; the list holds what became of it once the thread has ended."""
        ends: Ends = []

        def run() -> None:
            try:
                ends.append(engine.generate(self.prompt(name), self.sizes.new_tokens))
            except Exception as error:
                ends.append(error)

        thread = threading.Thread(target=run, name=f"ask {name}", daemon=True)
        thread.start()
        return thread, ends

    def checked(self, asked: Asked, name: str, *, other_model: bool = False) -> Answer:
        """Wait for an answer and check its ids, and that there is a reason for what was not hit."""
        answer = self._ended(asked, name)
        expected = self.reference(name, other_model=other_model)
        assert answer.ids == expected, f"{name}: {answer} differs from the one without a store, {expected}"
        assert answer.hit <= self.sizes.full_hit_tokens, f"{name}: more than can be hit: {answer}"
        if answer.hit < self.sizes.full_hit_tokens:
            assert answer.reasons, f"{name}: a hit that is not full needs a reason: {answer}"
        unknown = set(answer.reasons) - set(MissReason)
        assert not unknown, f"{name}: no reasons of kvstore.types.MissReason: {sorted(unknown)}"
        return answer

    def _ended(self, asked: Asked, name: str) -> Answer:
        thread, ends = asked
        thread.join(self.sizes.answer_seconds_max)
        assert ends, f"{name}: no answer within {self.sizes.answer_seconds_max:g} s"
        if isinstance(ends[0], Exception):
            raise AssertionError(f"{name}: the request failed: {ends[0]!r}") from ends[0]
        return ends[0]

    def store(self, *names: str) -> None:
        """Let an engine answer prompts and save them; they lie in host memory then, and soon on SSD."""
        with self.engine() as engine:
            for name in names:
                self.ask(engine, name)
            engine.forget()

    def hits_again(self, engine: Engine, name: str) -> Answer:
        """Ask until the prompt hits in full: clients come back by themselves, after a while."""

        def hit() -> Answer | None:
            engine.forget()
            answer = self.ask(engine, name)
            return answer if answer.hit == self.sizes.full_hit_tokens else None

        return eventually(hit, f"{name} hits again", seconds=self.sizes.answer_seconds_max)
