"""What the demo shows at its end: the turns, where the blocks lie, and a verdict; the same as JSON."""

from __future__ import annotations

import dataclasses
import math
import platform
from typing import Any

from kvstore import __version__
from kvstore.cli.demo_story import BLOCK_TOKENS, Outcome, Residency, Turn
from kvstore.cli.demo_text import QUESTIONS
from kvstore.cli.output import Sheet, bytes_text, count_text, duration_text, plain, styled

TURN_COLUMNS = (
    "turn", "prompt tokens>", "from the store>", "found in", "without store>", "with store>",
    "speed-up>", "ideal>", "identical",
)  # fmt: skip
RESIDENCY_COLUMNS = ("when", "blocks>", "in host memory>", "on SSD>", "size>", "class", "expires in")


def sheet(outcome: Outcome, *, dtype: str) -> Sheet:
    """Return the whole report as it is printed."""
    page = Sheet()
    page.line("")
    rows = [_turn_cells(number, turn) for number, turn in enumerate(outcome.turns, 1)]
    page.table("Time to the first token", TURN_COLUMNS, rows)
    page.line("with store: match + fetch + injection + computing the rest, measured in the worker.")
    page.line(
        "ideal: FLOPs of the whole prompt / FLOPs of the rest, which still attends to the whole prefix."
    )
    page.line("")
    page.table("Where the conversation lies", RESIDENCY_COLUMNS, map(_residency_cells, outcome.residencies))
    page.line("What was said, by both")
    for question, turn in zip(QUESTIONS, outcome.turns, strict=False):
        page.line(f"   {question}  >  {' '.join(turn.stored['text'].split())} ...")
    page.line("")
    for line in _remarks(outcome, dtype=dtype):
        page.line(line)
    page.markup(_verdict(outcome))
    return page


def _turn_cells(number: int, turn: Turn) -> tuple[str, ...]:
    stored = turn.stored
    found = " + ".join(f"{tier} {blocks} blocks" for tier, blocks in stored["tiers"].items())
    faster = turn.speed_up >= 1.5
    return (
        f"{number}  {plain(turn.act.name)}",
        count_text(stored["prompt_tokens"]),
        f"{count_text(stored['hit_tokens'])}  {100 * turn.hit_share:5.1f} %",
        plain(found or (stored["reason"] or "-")),
        f"{turn.plain['first_token_seconds']:.2f} s",
        f"{stored['first_token_seconds']:.2f} s",
        styled(f"{turn.speed_up:.1f}x", "bold green") if faster else f"{turn.speed_up:.1f}x",
        f"{turn.ideal_speed_up:.1f}x",
        styled("yes", "green") if turn.is_identical else styled("NO", "bold red"),
    )


def _residency_cells(at: Residency) -> tuple[str, ...]:
    return (
        plain(at.moment),
        count_text(at.blocks),
        count_text(at.host_blocks),
        count_text(at.ssd_blocks),
        bytes_text(at.bytes),
        plain(at.retention_class),
        duration_text(at.expires_in_seconds) if at.blocks else "-",
    )


def _remarks(outcome: Outcome, *, dtype: str) -> list[str]:
    remarks = []
    for number, turn in enumerate(outcome.turns, 1):
        if not turn.came_from_expected_tier:
            remarks.append(
                f"turn {number}: expected blocks from {turn.act.expected_tier}, "
                f"got {turn.stored['tiers'] or 'none'} (reason: {turn.stored['reason'] or 'none'})"
            )
        if turn.stored["unsaved_reason"]:
            remarks.append(
                f"turn {number}: not everything was saved (reason: {turn.stored['unsaved_reason']})"
            )
    if dtype != "float32":
        remarks.append(
            f"{dtype} rounds differently for few rows than for many: ids may differ, float32 is exact here."
        )
    return remarks


def _verdict(outcome: Outcome) -> str:
    if outcome.is_fine:
        last = outcome.turns[-1]
        text = (
            f"The same answers, the first token {outcome.turns[1].speed_up:.0f}x sooner from host memory and "
            f"{last.speed_up:.0f}x sooner from SSD after a restart."
        )
        return f"{styled('identical: yes', 'bold green')}  {plain(text)}"
    same = all(turn.is_identical for turn in outcome.turns)
    word = styled("identical: yes", "bold green") if same else styled("identical: no", "bold red")
    return f"{word}  {styled('The demo did not show what it should.', 'bold red')}"


def document(outcome: Outcome, *, tokens: int, dtype: str) -> dict[str, Any]:
    """Return the report as JSON-ready values."""
    return {
        "kvstore": __version__,
        "python": platform.python_version(),
        "model": {"name": "SmolLM2-135M-Instruct", "dtype": dtype, **outcome.model},
        "document_tokens": tokens,
        "block_tokens": BLOCK_TOKENS,
        "identical": all(turn.is_identical for turn in outcome.turns),
        "fine": outcome.is_fine,
        "turns": [_turn_plain(number, turn) for number, turn in enumerate(outcome.turns, 1)],
        "residency": [_finite(dataclasses.asdict(at)) for at in outcome.residencies],
        "restart_seconds": outcome.restart_seconds,
        "seconds": outcome.seconds,
    }


def _turn_plain(number: int, turn: Turn) -> dict[str, Any]:
    kept = (
        "prompt_tokens", "hit_tokens", "tiers", "reason", "steps_seconds", "stored_blocks", "text",
    )  # fmt: skip
    return {
        "turn": number,
        "act": turn.act.name,
        **{key: turn.stored[key] for key in kept},
        "hit_share": turn.hit_share,
        "first_token_seconds": turn.stored["first_token_seconds"],
        "first_token_seconds_without_store": turn.plain["first_token_seconds"],
        "speed_up": turn.speed_up,
        "speed_up_ideal": turn.ideal_speed_up,
        "identical": turn.is_identical,
        "answer_ids": list(turn.stored["ids"]),
        "answer_ids_without_store": list(turn.plain["ids"]),
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
