"""What the demo shows at its end: the turns, where the blocks lie, and a verdict; the same as JSON."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import textwrap
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from kvstore import __version__
from kvstore.cli.demo_story import BLOCK_TOKENS, Outcome, Residency, Turn
from kvstore.cli.demo_text import QUESTIONS
from kvstore.cli.output import Sheet, bytes_text, count_text, duration_text, plain, styled

RESIDENCY_COLUMNS = ("when", "blocks>", "in host>", "on ssd>", "size>", "class", "expires in")
ANSWER_CHARACTERS_MAX = 72
BUSY_MARGIN = 0.5
"""Load beyond the cores that is put down to others; the demo itself keeps one to two cores busy."""


def sheet(outcome: Outcome, *, dtype: str) -> Sheet:
    """Return the whole report as it is printed."""
    page = Sheet()
    page.line("")
    columns = [
        f"turn {number}\n{turn.act.name.replace(', ', chr(10))}>"
        for number, turn in enumerate(outcome.turns, 1)
    ]
    page.table("One conversation, three turns", ("", *columns), _turn_rows(outcome.turns))
    page.line("first token with store: match, fetch, injection and computing the rest")
    page.line("ideal: FLOPs of the prompt / FLOPs of the rest, which still attends to all of it")
    page.line("")
    page.table("Where the conversation lies", RESIDENCY_COLUMNS, map(_residency_cells, outcome.residencies))
    page.line(Text("What was said", style="bold"))
    for question, turn in zip(QUESTIONS, outcome.turns, strict=False):
        page.line(f"  {question}")
        page.line(f"    {_shortened(turn.stored['text'])}")
        if not turn.is_identical:
            page.line(f"    without the store: {_shortened(turn.plain['text'])}")
    page.line("")
    for line in _remarks(outcome, dtype=dtype):
        page.line(line)
    page.markup(_verdict(outcome))
    return page


def _shortened(text: str) -> str:
    return textwrap.shorten(text, ANSWER_CHARACTERS_MAX, placeholder=" ...")


def _turn_rows(turns: Sequence[Turn]) -> list[tuple[str, ...]]:
    """Return one line per quantity, one column per turn: that fits on a narrow screen."""
    return [
        ("prompt tokens", *(count_text(turn.stored["prompt_tokens"]) for turn in turns)),
        ("  of these from the store", *(count_text(turn.stored["hit_tokens"]) for turn in turns)),
        ("  hit", *(f"{100 * turn.hit_share:.1f} %" for turn in turns)),
        ("  blocks found in", *(plain(_tiers_text(turn)) for turn in turns)),
        ("first token without store", *(f"{turn.plain['first_token_seconds']:.2f} s" for turn in turns)),
        ("first token with store", *(f"{turn.stored['first_token_seconds']:.2f} s" for turn in turns)),
        ("speed-up", *(_speed_up_text(turn) for turn in turns)),
        ("  its arithmetic ideal", *(f"{turn.ideal_speed_up:.1f}x" for turn in turns)),
        ("identical answer", *(_yes_or_no(turn.is_identical) for turn in turns)),
    ]


def _tiers_text(turn: Turn) -> str:
    return " + ".join(f"{tier}: {blocks}" for tier, blocks in turn.stored["tiers"].items()) or "-"


def _speed_up_text(turn: Turn) -> str:
    return styled(f"{turn.speed_up:.1f}x", "bold green" if turn.stored["hit_tokens"] else "dim")


def _yes_or_no(value: bool) -> str:
    return styled("yes", "green") if value else styled("NO", "bold red")


def _residency_cells(at: Residency) -> tuple[str, ...]:
    return (
        plain(at.moment),
        count_text(at.blocks),
        count_text(at.host_blocks),
        count_text(at.ssd_blocks),
        bytes_text(at.bytes),
        plain(at.retention_class),
        duration_text(round(at.expires_in_seconds / 60) * 60.0) if at.blocks else "-",
    )


def _remarks(outcome: Outcome, *, dtype: str) -> list[str]:
    remarks = list(outcome.remarks)
    cores = os.cpu_count() or 1
    if outcome.load_average > cores + BUSY_MARGIN:
        remarks.append(
            f"other work kept this machine busy (load {outcome.load_average:.1f} on {cores} cores): "
            "the times say little, the ids and hits hold"
        )
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
    differing = [str(number) for number, turn in enumerate(outcome.turns, 1) if not turn.is_identical]
    if differing:
        text = f"turn {', '.join(differing)} answered otherwise than without the store."
        return f"{styled('identical: no', 'bold red')}  {plain(text)}"
    return (
        f"{styled('identical: yes', 'bold green')}  {styled('But hits are missing, see above.', 'bold red')}"
    )


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
        "remarks": _remarks(outcome, dtype=dtype),
        "load_average": outcome.load_average,
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
