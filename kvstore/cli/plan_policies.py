"""`kvstore plan --policies`: the orders of eviction side by side, beside the best possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.cli.output import Sheet, count_text, emit_json, progress
from kvstore.cli.traces import classes_of
from kvstore.core.eviction import POLICIES
from kvstore.errors import InvalidArgument
from kvstore.trace.classing import ClassRules
from kvstore.trace.planner import Comparison, compare
from kvstore.trace.requests import TraceFile
from kvstore.types import Tier, TtlMode


def show_policies(
    file: TraceFile, capacities: Sequence[int], rules: ClassRules, *, jobs: int, as_json: bool
) -> None:
    """Run every order at every capacity and print what came of it.

    Errors: InvalidArgument where nothing would ever have to leave.
    """
    if min(capacities) < 1:
        raise InvalidArgument("--policies needs --capacity-blocks: with room for all nothing has to leave")
    with progress("policies", total=len(capacities) * (len(POLICIES) + 1)) as bar:
        found = compare(
            file.path,
            block_tokens=file.block_tokens,
            capacities=capacities,
            rules=rules,
            classes=classes_of(["inf"], TtlMode.SLIDING, rules, lowest=Tier.HOST),
            jobs=jobs,
            on_done=bar.to,
        )
    if as_json:
        emit_json({"trace": str(file.path), "points": [_row(item) for item in found]})
    else:
        _sheet(found).show()


def _row(item: Comparison) -> dict[str, Any]:
    return {
        "capacity_blocks": item.capacity_blocks,
        "token_hit_rates": item.token_hit_rates,
        "optimum_token_hit_rate": item.optimum,
        "gap": item.gap,
        "gap_closed": {name: item.closed(name) for name in item.token_hit_rates},
    }


def _sheet(found: Sequence[Comparison]) -> Sheet:
    sheet = Sheet()
    names = list(POLICIES)
    columns = ["blocks>", *(f"{name}>" for name in names), "best possible>", "gap>"]
    columns += [f"{name} closes>" for name in names if name != "lru"]
    rows = [
        [
            count_text(item.capacity_blocks),
            *(f"{rate:.3%}" for rate in item.token_hit_rates.values()),
            f"{item.optimum:.3%}",
            f"{100 * item.gap:.2f}",
            *(f"{item.closed(name):.1%}" for name in names if name != "lru"),
        ]
        for item in found
    ]
    sheet.table("Hit rate of tokens by order of eviction, nothing expires", columns, rows)
    sheet.line(
        "The best possible knows the future, ignores that a block needs all before it, and may bypass: "
        "no order reaches it."
    )
    return sheet
