"""The paged KV pool: keys and values of full-history layers, in pages of one block, on any torch device.

It knows pages and bytes. Which page holds what is the business of `hbm.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvstore.engine.config import LayerKind, ModelConfig
from kvstore.engine.streams import InPlace, SideStream
from kvstore.engine.windows import GROUP, WindowFormat
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
        self._device = device
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

    def views(self, stage: int, pages: Sequence[int]) -> list[torch.Tensor]:
        """Return the bytes of neighbouring pages, one tensor for each layer of a stage.

        Shapes: u8[pages, layer_bytes].
        """
        first, stop = pages[0], pages[0] + len(pages)
        return [
            self._rows[layer].view(-1).view(torch.uint8).view(-1, self.layer_bytes)[first:stop]
            for layer in self.stages[stage]
        ]

    def copies(self) -> InPlace:
        """Return what copies the blocks of one load or save."""
        return SideStream.of(self._device)


def neighbours(pages: Sequence[int], first: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the stretches of neighbouring pages from block `first` on."""
    start = first
    for index in range(first + 1, len(pages) + 1):
        if index == len(pages) or pages[index] != pages[index - 1] + 1:
            yield start, index
            start = index


def pages_within(budget_bytes: int, *, block_bytes: int) -> int:
    """Return how many pages a budget buys.

    Errors: InvalidArgument when it is not one.
    """
    if budget_bytes < block_bytes:
        raise InvalidArgument(f"pool: {budget_bytes} bytes hold no block of {block_bytes} bytes")
    return budget_bytes // block_bytes
