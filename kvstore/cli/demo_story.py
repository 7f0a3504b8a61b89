"""The demo's course of events: one conversation, three worker processes, one daemon that restarts."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.cli.child import ChildDaemon
from kvstore.cli.connection import Daemon
from kvstore.cli.demo_ideal import ModelSizes
from kvstore.cli.demo_process import WorkerProcess
from kvstore.cli.demo_text import Conversation
from kvstore.cli.views import RunView

BLOCK_TOKENS = 32
ANSWER_TOKENS_MAX = 32
SETTLE_SECONDS_MAX = 20.0
ARENA_BYTES_MIN = 256 << 20
SHARED_MEMORY = Path("/dev/shm")

Step = Callable[[str], AbstractContextManager[Callable[[str], None]]]
"""Shows that something is under way; what it yields replaces the text by the outcome."""


@dataclass(frozen=True, slots=True)
class Act:
    """One turn: who asks, and from where the prefix is expected."""

    name: str
    expected_tier: str


ACTS = (
    Act("empty store", ""),
    Act("a fresh process", "host"),
    Act("daemon restarted, a fresh process", "ssd"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn cost with and without the store. Units: seconds to the first token."""

    act: Act
    plain: dict[str, Any]
    stored: dict[str, Any]
    ideal_speed_up: float

    @property
    def is_identical(self) -> bool:
        """Whether both answers have the same token ids."""
        return list(self.plain["ids"]) == list(self.stored["ids"])

    @property
    def speed_up(self) -> float:
        """How many times sooner the first token came."""
        return float(self.plain["first_token_seconds"] / self.stored["first_token_seconds"])

    @property
    def hit_share(self) -> float:
        """Share of the prompt that came from the store."""
        return float(self.stored["hit_tokens"] / self.stored["prompt_tokens"])

    @property
    def came_from_expected_tier(self) -> bool:
        """Whether the hit is what this act is to show."""
        return not self.act.expected_tier or self.stored["tiers"].get(self.act.expected_tier, 0) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Where the blocks of the conversation lay at one moment. Units: expires_in from then, in seconds."""

    moment: str
    blocks: int
    host_blocks: int
    ssd_blocks: int
    bytes: int
    retention_class: str
    expires_in_seconds: float


@dataclass(slots=True)
class Outcome:
    """Everything that the demo found out."""

    model: dict[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    residencies: list[Residency] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    restart_seconds: float = 0.0
    seconds: float = 0.0
    load_average: float = 0.0

    @property
    def is_fine(self) -> bool:
        """Whether all answers are identical and every hit came from where it should."""
        shown = len(self.turns) == len(ACTS) and all(turn.came_from_expected_tier for turn in self.turns)
        return shown and all(turn.is_identical for turn in self.turns)


class Story:
    """Plays the acts. `directory` belongs to the demo alone."""

    def __init__(self, directory: Path, *, tokens: int, dtype: str, step: Step) -> None:
        self._directory = directory
        self._tokens = tokens
        self._dtype = dtype
        self._step = step
        self._outcome = Outcome()
        self._fingerprint = b""
        self._conversation_bytes = 0

    def play(self) -> Outcome:
        """Run the whole demo.

        Errors: KVStoreError when the daemon or a worker cannot be started or ends early.
        """
        began = time.monotonic()
        with self._worker(1) as worker:
            with self._step("preparing the text") as said:
                chat = _conversation(worker.ask("conversation", tokens=self._tokens))
                said(f"text: {self._tokens:,} tokens of a Python file, {len(ACTS)} questions")
            prompts, plain = self._without_store(worker, chat)
            daemon = self._daemon(len(prompts[-1]))
            with daemon:
                self._open(worker, daemon)
                self._turn(worker, 1, prompts[0], plain[0])
                self._look(daemon, "after turn 1")
                with self._worker(2) as second:
                    self._open(second, daemon)
                    self._turn(second, 2, prompts[1], plain[1])
                self._look(daemon, "after turn 2")
                self._restart(daemon)
                with self._worker(3) as third:
                    self._open(third, daemon)
                    self._look(daemon, "after the restart")
                    self._turn(third, 3, prompts[2], plain[2])
                self._look(daemon, "after turn 3")
        self._outcome.seconds = time.monotonic() - began
        self._outcome.load_average = os.getloadavg()[0]
        return self._outcome

    @contextmanager
    def _worker(self, number: int) -> Iterator[WorkerProcess]:
        with WorkerProcess(self._directory / f"worker-{number}.log") as process:
            with self._step(f"worker {number}: loading SmolLM2-135M-Instruct") as said:
                self._outcome.model = process.ask("load", heard=said, dtype=self._dtype)
                said(f"worker {number}: a fresh process with SmolLM2-135M-Instruct in {self._dtype}")
            yield process

    def _daemon(self, tokens: int) -> ChildDaemon:
        """Return a daemon with room for the conversation twice over; on disk where /dev/shm is too small."""
        self._conversation_bytes = (tokens + ANSWER_TOKENS_MAX) * int(self._outcome.model["token_bytes"])
        arena_bytes = max(ARENA_BYTES_MIN, 2 * self._conversation_bytes)
        settings = {}
        if _free_bytes(SHARED_MEMORY) < arena_bytes * 5 // 4:
            settings["host.directory"] = str(self._directory)
            self._outcome.remarks.append(
                f"{SHARED_MEMORY} has no room for {arena_bytes >> 20} MiB: host memory was a file on disk"
            )
        return ChildDaemon(self._directory, arena_bytes=arena_bytes, settings=settings)

    def _without_store(
        self, worker: WorkerProcess, chat: Conversation
    ) -> tuple[list[tuple[int, ...]], list[dict[str, Any]]]:
        """Hold the conversation with the library alone: its answers and times are the yardstick."""
        prompts, answers = [chat.opening], []
        for turn in range(1, len(ACTS) + 1):
            size = f"{len(prompts[-1]):,} tokens"
            with self._step(f"turn {turn} without the store: computing {size}") as said:
                answer = worker.ask("plain", prompt=prompts[-1], max_new_tokens=ANSWER_TOKENS_MAX)
                said(f"turn {turn} without the store: {size}, {_first(answer)}")
            answers.append(answer)
            if turn < len(ACTS):
                prompts.append(chat.next_prompt(prompts[-1], tuple(answer["ids"]), turn=turn))
        return prompts, answers

    def _turn(
        self, worker: WorkerProcess, number: int, prompt: tuple[int, ...], plain: dict[str, Any]
    ) -> None:
        act = ACTS[number - 1]
        with self._step(f"turn {number} with the store ({act.name})") as said:
            stored = worker.ask("ask", prompt=prompt, max_new_tokens=ANSWER_TOKENS_MAX)
            said(f"turn {number} with the store ({act.name}): {_first(stored)}")
        sizes = ("layers", "heads", "head_dim", "layer_parameters", "head_parameters")
        model = ModelSizes(**{name: self._outcome.model[name] for name in sizes})
        ideal = model.speed_up(tokens=stored["prompt_tokens"], known=stored["hit_tokens"])
        self._outcome.turns.append(Turn(act=act, plain=plain, stored=stored, ideal_speed_up=ideal))

    def _open(self, worker: WorkerProcess, daemon: ChildDaemon) -> None:
        """Connect a worker; it allocates what it needs beside the model now, as engines do at their start."""
        opened = worker.ask(
            "open", address=daemon.address, block_tokens=BLOCK_TOKENS, staging_bytes=self._conversation_bytes
        )
        self._fingerprint = bytes.fromhex(opened["fingerprint"])

    def _restart(self, daemon: ChildDaemon) -> None:
        with self._step("stopping the daemon (SIGTERM) and starting it again") as said:
            began = time.monotonic()
            daemon.stop()
            stopped = time.monotonic() - began
            started = daemon.start()
            self._outcome.restart_seconds = started
            said(f"daemon stopped in {stopped:.1f} s, serving again {started:.1f} s after its start")

    def _look(self, daemon: ChildDaemon, moment: str) -> None:
        """Note where the blocks lie, once what is on its way to SSD has arrived."""
        keys = bytes.fromhex(self._outcome.turns[-1].stored["keys"])
        with self._step(f"where the blocks lie {moment}"), Daemon(daemon.address) as connection:
            deadline = time.monotonic() + SETTLE_SECONDS_MAX
            while True:
                reply = connection.inspect(self._fingerprint, keys=keys)
                runs = [RunView.from_wire(run) for run in reply.runs]
                settled = bool(runs) and all(run.ssd_blocks == run.blocks for run in runs)
                if settled or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        self._outcome.residencies.append(_summed(moment, runs))


def _free_bytes(mount: Path) -> int:
    try:
        return shutil.disk_usage(mount).free
    except OSError:
        return 0


def _conversation(plain: dict[str, Any]) -> Conversation:
    return Conversation(tuple(plain["opening"]), tuple(map(tuple, plain["follow_ups"])), plain["end"])


def _first(answer: dict[str, Any]) -> str:
    return f"first token after {answer['first_token_seconds']:.2f} s"


def _summed(moment: str, runs: list[RunView]) -> Residency:
    expiries = [run.expires_at for run in runs if run.expires_at is not None]
    return Residency(
        moment=moment,
        blocks=sum(run.blocks for run in runs),
        host_blocks=sum(run.host_blocks for run in runs),
        ssd_blocks=sum(run.ssd_blocks for run in runs),
        bytes=sum(run.bytes for run in runs),
        retention_class=", ".join(sorted({run.retention_class for run in runs})),
        expires_in_seconds=min(expiries, default=float("inf")) - time.time(),
    )
