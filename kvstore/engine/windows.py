"""What window layers need to go on at a block boundary: their last rows, kept here and in the daemon.

Blocks hold full-history layers only. A prefix of a model with window layers can be resumed where its blocks
and the rows of exactly that boundary are there.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch

from kvstore.engine.config import LayerKind, ModelConfig
from kvstore.engine.streams import Bytes
from kvstore.layout import Part, Segment
from kvstore.types import HASH_BYTES, key_at

GROUP = "windows"


@dataclass(slots=True)
class WindowRows:
    """What one sequence keeps of its window layers: its last window - 1 rows, or all if it has fewer.

    A step replaces tensors and never writes into them, so that a copy costs nothing.
    Shapes: layer -> [rows, 2, kv_heads, head_dim].
    """

    rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def copy(self) -> WindowRows:
        """Return the rows as they are now."""
        return WindowRows(dict(self.rows))

    @staticmethod
    def blank(config: ModelConfig, tokens: int, *, dtype: torch.dtype, device: torch.device) -> WindowRows:
        """Return what a sequence of so many zero rows keeps."""
        shape = (min(tokens, max(0, config.window - 1)), 2, config.kv_heads, config.head_dim)
        blank = torch.zeros(shape, dtype=dtype, device=device)
        return WindowRows(dict.fromkeys(config.of_kind(LayerKind.WINDOW), blank))


class WindowFormat:
    """The rows of one boundary as one record, layer by layer; shorter ones stand at its end."""

    def __init__(self, config: ModelConfig, *, part: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers = config.of_kind(LayerKind.WINDOW)
        self._shape = (len(self.layers), config.window - 1, 2, config.kv_heads, config.head_dim)
        self._dtype = dtype
        self._device = device
        size = int(np.prod(self._shape)) * dtype.itemsize
        segment = Segment(self.layers[0], len(self.layers), 0, size)
        self.part = Part(part, GROUP, "all", size, (segment,))

    def blank(self) -> Bytes:
        """Return a record that `unpack` knows to be none. Shapes: u8[1, bytes]."""
        return np.full((1, self.part.bytes_max), 0xFF, np.uint8)

    def pack(self, window: WindowRows) -> Bytes:
        """Return rows as a record."""
        record = torch.zeros(self._shape, dtype=self._dtype)
        for index, layer in enumerate(self.layers):
            rows = window.rows[layer]
            record[index, record.shape[1] - len(rows) :] = rows.cpu()
        plain: Bytes = record.view(-1).view(torch.uint8).numpy()[None]
        return plain

    def unpack(self, record: Bytes, *, tokens: int) -> WindowRows | None:
        """Return the rows of a sequence of so many tokens, None when nothing was written to the record."""
        if (record[0, -64:] == 0xFF).all():
            return None
        every = torch.from_numpy(record[0]).view(self._dtype).view(self._shape).to(self._device)
        count = min(tokens, self._shape[1])
        return WindowRows({layer: every[i, self._shape[1] - count :] for i, layer in enumerate(self.layers)})


class Checkpoints:
    """Window rows by the key of the block before their boundary; beyond a number the least used go.

    Threads: the engine's.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._rows: OrderedDict[bytes, WindowRows] = OrderedDict()

    def keep(self, key: bytes, window: WindowRows) -> None:
        """Remember the rows behind a block."""
        self._rows[key] = window
        self._rows.move_to_end(key)
        while len(self._rows) > self._count_max:
            self._rows.popitem(last=False)

    def latest(self, keys: bytes, blocks: int) -> tuple[int, WindowRows]:
        """Return the last boundary within the first `blocks` blocks that is known, and its rows."""
        for boundary in range(min(blocks, len(keys) // HASH_BYTES), 0, -1):
            key = key_at(keys, boundary - 1)
            if (window := self._rows.get(key)) is not None:
                self._rows.move_to_end(key)
                return boundary, window.copy()
        return 0, WindowRows()
