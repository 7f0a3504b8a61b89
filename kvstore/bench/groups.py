"""The one registry of groups: a group's name, its rows, and the module whose `run` measures them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from kvstore.bench import rows
from kvstore.bench.harness import Bench
from kvstore.bench.rows import Row, RowSpec


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are measured together. `run` of its module yields each of them once, in order.

    One that computes with a model takes minutes and other packages, one that stores millions of blocks takes
    minutes and memory, one without a bar is wanted seldom: they run only when they are named.
    """

    name: str
    rows: tuple[RowSpec, ...]
    takes_model: bool = False
    only_named: bool = False

    def run(self, bench: Bench) -> Iterator[Row]:
        """Measure; the module is imported only now."""
        module = import_module(f"kvstore.bench.{self.name}")
        return cast(Callable[[Bench], Iterator[Row]], module.run)(bench)


GROUPS: dict[str, Group] = {
    group.name: group
    for group in (
        Group("host", (rows.HOST_HIT, rows.HOST_HIT_VERIFIED, rows.HOST_HIT_LAYERED)),
        Group("put", (rows.PUT, rows.PUT_ONE_THREAD)),
        Group(
            "steps",
            (
                rows.HIT_MATCH,
                rows.HIT_FETCH,
                rows.HIT_RELEASE,
                rows.PUT_RESERVE,
                rows.PUT_FILL,
                rows.PUT_COMMIT,
            ),
            only_named=True,
        ),
        Group("ssd", (rows.SSD_READ, rows.SSD_HIT)),
        Group("encryption", (rows.SSD_ENCRYPTED,)),
        Group("match", (rows.MATCH_600, rows.MATCH_7800)),
        Group("scale", (rows.MATCH_SCALE, rows.INDEX_BYTES), only_named=True),
        Group("start", (rows.START_CLEAN, rows.START_KILLED, rows.START_REBUILD), only_named=True),
        Group("clients", (rows.CLIENTS_4, rows.CLIENTS_16)),
        Group("storm", (rows.STORM_P99,), only_named=True),
        Group("framed", (rows.FRAMED,)),
        Group("prefetch", (rows.PREFETCH,)),
        Group(
            "vllm",
            (rows.VLLM_WARM_HOST, rows.VLLM_LOOKUP, rows.VLLM_WARM_SSD, rows.VLLM_SAVING),
            takes_model=True,
        ),
        Group(
            "engine",
            (
                rows.ENGINE_PREFILL_HOST,
                rows.ENGINE_PREFILL_SSD,
                rows.ENGINE_HIDDEN,
                rows.ENGINE_VS_HF_PREFILL,
                rows.ENGINE_VS_HF_DECODE,
            ),
            takes_model=True,
        ),
        Group("expiry", (rows.EXPIRY_P999, rows.EXPIRY_MAX)),
    )
}
DEFAULT = tuple(name for name, group in GROUPS.items() if not (group.takes_model or group.only_named))
