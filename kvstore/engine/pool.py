"""The paged KV pool: keys and values of full-history layers, in pages of one block, on any torch device.

It knows pages and bytes. Which page holds what is the business of `hbm.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from kvstore.engine.config import LayerKind, ModelConfig
from kvstore.engine.windows import GROUP, Bytes, WindowFormat
from kvstore.errors import InvalidArgument
from kvstore.layout import CacheGroup, Layout, Part, Segment
from kvstore.types import SEGMENTS_MAX, GroupKind

STAGES_MAX = 8
"""Layers arrive in so many parts at most: enough to hide a load behind compute, few enough to stay cheap."""


def stages_of(layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Cut layers into stages that load one after another, at most eight layers each."""
    count = max(-(-len(layers) // SEGMENTS_MAX), min(STAGES_MAX, -(-len(layers) // 4)))
    edges = [round(index * len(layers) / count) for index in range(count + 1)]
    return tuple(tuple(layers[a:b]) for a, b in itertools.pairwise(edges))


class KvPool:
    """Pages for `page_count` blocks, page 0 left out, and one scratch page for each of `scratch_count` rows.

    A row is what one layer keeps of one token. Rows of neighbouring pages are neighbours, so that a run of
    pages is one view.
    Shapes: layer tensor [pages x block_tokens, 2, kv_heads, head_dim].
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        block_tokens: int,
        page_count: int,
        scratch_count: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_tokens = block_tokens
        self.page_count = page_count
        self.layers = config.of_kind(LayerKind.FULL)
        self.scratch = tuple(range(page_count + 1, page_count + 1 + scratch_count))
        self.layer_bytes = block_tokens * config.row_width * dtype.itemsize
        pages = 1 + page_count + scratch_count
        shape = (pages * block_tokens, 2, config.kv_heads, config.head_dim)
        # Touched now: the first touch of a page costs more than a copy into it.
        self._rows = {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in self.layers}
        self.stages = stages_of(self.layers)
        self.windows = (
            WindowFormat(config, part=len(self.stages), dtype=dtype, device=device) if config.window else None
        )
        self.layout = self._layout(str(dtype).removeprefix("torch."))

    def _layout(self, dtype: str) -> Layout:
        size = self.layer_bytes
        parts = tuple(
            Part(
                index=index,
                group="kv",
                shard=f"layers {stage[0]}-{stage[-1]}",
                bytes_max=size * len(stage),
                segments=tuple(
                    Segment(layer, 1, size * position, size) for position, layer in enumerate(stage)
                ),
            )
            for index, stage in enumerate(self.stages)
        )
        if self.windows is None:
            return Layout(dtype, (CacheGroup("kv"),), parts).checked()
        groups = (CacheGroup("kv"), CacheGroup(GROUP, GroupKind.CHECKPOINT))
        return Layout(dtype, groups, (*parts, self.windows.part)).checked()

    @property
    def block_bytes(self) -> int:
        """Bytes of all layers of one block."""
        return self.layer_bytes * len(self.layers)

    def rows(self, layer: int) -> torch.Tensor:
        """Return a layer's rows, pages one after another."""
        return self._rows[layer]

    def slots(self, pages: Sequence[int], first: int, stop: int) -> torch.Tensor | slice:
        """Return where the tokens [first, stop) of a sequence lie: a slice where its pages are neighbours."""
        size = self.block_tokens
        begin = first // size
        used = np.asarray(pages[begin : -(-stop // size)], np.int64)
        offset = first - begin * size
        if len(used) and used[-1] - used[0] == len(used) - 1 and (np.diff(used) == 1).all():
            start = int(used[0]) * size + offset
            return slice(start, start + stop - first)
        every = (used[:, None] * size + np.arange(size)).reshape(-1)
        return torch.from_numpy(every[offset : offset + stop - first])

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in every layer."""
        size = self.block_tokens
        for rows in self._rows.values():
            rows[target * size : (target + 1) * size].copy_(rows[source * size : (source + 1) * size])

    def stage_bytes(self, stage: int, pages: Sequence[int]) -> list[Bytes] | None:
        """Return the bytes of some pages of a stage's layers, one array per layer and row per page, without a
        copy; None where they are no host memory, or the pages are no neighbours.
        """
        first, count = pages[0], len(pages)
        if list(pages) != list(range(first, first + count)):
            return None
        views = []
        for layer in self.stages[stage]:
            rows = self._rows[layer]
            if rows.device.type != "cpu":
                return None
            plain: Bytes = rows.view(-1).view(torch.uint8).numpy().reshape(-1, self.layer_bytes)
            views.append(plain[first : first + count])
        return views

    def new_staging(self, stage: int, count: int) -> list[Bytes]:
        """Return buffers like `stage_bytes` that belong to nobody; pinned where the device wants it."""
        pinned = self._rows[self.layers[0]].device.type == "cuda"
        return [
            torch.empty((count, self.layer_bytes), dtype=torch.uint8, pin_memory=pinned).numpy()
            for _ in self.stages[stage]
        ]

    def scatter(self, stage: int, pages: Sequence[int], staging: Sequence[Bytes]) -> None:
        """Copy staged blocks into their pages."""
        for layer, source in zip(self.stages[stage], staging, strict=True):
            by_page = self._by_page(layer)
            index = torch.tensor(pages, device=by_page.device)
            by_page.index_copy_(0, index, torch.from_numpy(source[: len(pages)]).to(by_page.device))

    def gather(self, stage: int, pages: Sequence[int]) -> list[Bytes]:
        """Copy pages out, as `stage_bytes` shows them."""
        index = torch.tensor(pages)
        return [
            self._by_page(layer).index_select(0, index.to(self._rows[layer].device)).cpu().numpy()
            for layer in self.stages[stage]
        ]

    def _by_page(self, layer: int) -> torch.Tensor:
        rows = self._rows[layer]
        return rows.view(-1).view(torch.uint8).view(-1, self.layer_bytes)


def pages_within(budget_bytes: int, *, block_bytes: int) -> int:
    """Return how many pages a budget buys.

    Errors: InvalidArgument when it is not one.
    """
    if budget_bytes < block_bytes:
        raise InvalidArgument(f"pool: {budget_bytes} bytes hold no block of {block_bytes} bytes")
    return budget_bytes // block_bytes
