"""scale: what ten million blocks on SSD cost: the time of a match, and the memory of their index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from kvstore.bench import prompt, rows
from kvstore.bench.filling import AGENT, CHAT, Filled, Shape, fill
from kvstore.bench.harness import Bench, timed
from kvstore.bench.prompt import Prompt
from kvstore.bench.rows import Row
from kvstore.cli.child import ChildDaemon
from kvstore.client import Client
from kvstore.errors import TierUnavailable

BLOCKS, BLOCKS_QUICK = 10_000_000, 400_000
BLOCKS_FEW = 10_000
CHAT_BLOCKS, CHAT_BLOCKS_QUICK = 2_000_000, 100_000
ARENA_BYTES = 160 << 20
CALLS, CALLS_QUICK = 40, 20
START_SECONDS = 900.0
SETTINGS = {"ssd.scrub_bytes_per_second": "0", "ssd.capacity_bytes": "64TiB"}
"""The files are sparse: what they would be is far beyond the disk, and there is nothing in them to scrub."""


def run(bench: Bench) -> Iterator[Row]:
    """Measure the rows of the group."""
    blocks = BLOCKS_QUICK if bench.is_quick else BLOCKS
    with ExitStack() as stack:
        many, filled = _store(bench, stack, AGENT, blocks)
        few, filled_few = _store(bench, stack, AGENT, BLOCKS_FEW)
        memory = anonymous_bytes(many.pid), anonymous_bytes(few.pid)
        yield _match(bench, stack, many, few, note=told(filled))
    chat_blocks = CHAT_BLOCKS_QUICK if bench.is_quick else CHAT_BLOCKS
    with ExitStack() as stack:
        daemon, filled_chat = _store(bench, stack, CHAT, chat_blocks)
        chat = anonymous_bytes(daemon.pid)
    value = (memory[0] - memory[1]) / (filled.blocks - filled_few.blocks)
    of_chat = (chat - memory[1]) / (filled_chat.blocks - filled_few.blocks)
    detail = f"{memory[0] / 1e6:.0f} MB against {memory[1] / 1e6:.0f} MB with {filled_few.blocks:,} blocks; "
    yield Row(rows.INDEX_BYTES, value, f"{detail}{told(filled)}; chat: {of_chat:.1f} B, {told(filled_chat)}")


def _store(bench: Bench, stack: ExitStack, shape: Shape, blocks: int) -> tuple[ChildDaemon, Filled]:
    directory = stack.enter_context(bench.scratch())
    filled = fill(directory / "data", blocks=blocks, shape=shape, tell=bench.tell)
    daemon = child(bench, directory)
    bench.tell(f"{shape.name}: starting a daemon on {blocks:,} blocks")
    stack.callback(daemon.stop)
    daemon.start(deadline_seconds=START_SECONDS)
    return daemon, filled


def child(bench: Bench, directory: Path) -> ChildDaemon:
    """Return a daemon, not started, on a directory whose `data` was filled."""
    settings = {**SETTINGS, "host.directory": str(bench.shared_memory)}
    return ChildDaemon(directory, arena_bytes=ARENA_BYTES, settings=settings)


def _match(bench: Bench, stack: ExitStack, many: ChildDaemon, few: ChildDaemon, *, note: str) -> Row:
    calls = CALLS_QUICK if bench.is_quick else CALLS
    source = prompt.random_bytes(prompt.BLOCKS, prompt.BLOCK_BYTES, seed=3)

    def matcher(daemon: ChildDaemon) -> Callable[[], float]:
        client = stack.enter_context(Client(daemon.address))
        asked = Prompt.draw(client.open(prompt.block_major("filled")), prompt.BLOCKS, seed=11)
        asked.store(source, retention_class=prompt.HOST_ONLY)

        def match_all() -> None:
            for _ in range(calls):
                asked.match_once()

        return lambda: timed(match_all) / calls

    timings = bench.alternate("match_scale", many=matcher(many), few=matcher(few))
    return timings.row(rows.MATCH_SCALE, "many", "few", note=f"{calls} calls a round; {note}")


def told(filled: Filled) -> str:
    """Return what a store holds in words."""
    mean = filled.blocks / filled.runs
    return f"{filled.blocks:,} blocks in {filled.runs:,} runs (mean {mean:.0f}), {filled.segments:,} segments"


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that no file backs: neither page cache nor the arena.

    Errors: TierUnavailable where the kernel does not tell.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise TierUnavailable("this kernel does not tell a process's anonymous memory")
