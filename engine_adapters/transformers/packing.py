"""How the attention state of a causal model lies in a block, packing version 1; it knows tensors, no engine.

A block is layer-major: for every layer its keys and then its values, each [kv_heads, block_tokens, head_dim]
in the model's dtype. Layers are cut into at most eight equal segments, so that they can be handed out in
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import InvalidArgument
from kvstore.layout import Layout
from kvstore.types import SEGMENTS_MAX

KeysValues = tuple[torch.Tensor, torch.Tensor]
Blocks = npt.NDArray[np.uint8]
PACKING = "hf-dynamic-cache-v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Shape of the attention state of `block_tokens` tokens.

    Shapes: keys and values of one layer are [1, kv_heads, tokens, head_dim], keys already rotated.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_tokens: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of the keys and values of one layer of a block."""
        return 2 * self.kv_heads * self.block_tokens * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.layers * self.layer_bytes

    @property
    def segments(self) -> int:
        """The largest number of equal layer ranges that a layout may have."""
        return max(n for n in range(1, SEGMENTS_MAX + 1) if self.layers % n == 0)

    def layout(self) -> Layout:
        """Return the layout that describes a block."""
        name = str(self.dtype).removeprefix("torch.")
        return Layout.single(
            dtype=name, bytes_max=self.block_bytes, layers=self.layers, segments=self.segments
        )

    def new_blocks(self, count: int) -> Blocks:
        """Return an uninitialised buffer [count, block_bytes]."""
        return np.empty((count, self.block_bytes), np.uint8)

    def _by_layer(self, blocks: Blocks) -> torch.Tensor:
        """Return the same memory as [layers, 2, kv_heads, blocks, block_tokens, head_dim]."""
        typed = torch.from_numpy(blocks).view(self.dtype)
        shape = (len(blocks), self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)
        return typed.view(shape).permute(1, 2, 3, 0, 4, 5)

    def pack(self, layers: Sequence[KeysValues], *, first_block: int, count: int) -> Blocks:
        """Copy blocks [first_block, first_block + count) out of an attention state.

        Errors: InvalidArgument when the state has another shape or holds fewer tokens.
        """
        self._check(layers, tokens=(first_block + count) * self.block_tokens)
        blocks = self.new_blocks(count)
        start, length = first_block * self.block_tokens, count * self.block_tokens
        for target, source in zip(self._by_layer(blocks), layers, strict=True):
            for half in (0, 1):
                tokens = source[half][0].narrow(1, start, length)
                target[half].copy_(tokens.view(self.kv_heads, count, self.block_tokens, self.head_dim))
        return blocks

    def unpack(self, blocks: Blocks, *, devices: Sequence[torch.device]) -> list[KeysValues]:
        """Copy blocks into fresh keys and values per layer, each layer on its device.

        Memory comes from numpy, which asks the kernel for huge pages: a quarter of the time of a first touch.
        """
        shape = (2, self.kv_heads, len(blocks) * self.block_tokens, self.head_dim)
        layers: list[KeysValues] = []
        for source, device in zip(self._by_layer(blocks), devices, strict=True):
            memory = torch.from_numpy(np.empty(len(blocks) * self.layer_bytes, np.uint8))
            both = memory.view(self.dtype).view(shape)
            both.view(source.shape).copy_(source)
            keys, values = both.to(device)
            layers.append((keys[None], values[None]))
        return layers

    def _check(self, layers: Sequence[KeysValues], *, tokens: int) -> None:
        if len(layers) != self.layers:
            raise InvalidArgument(f"pack: {len(layers)} layers given, {self.layers} expected")
        for index, tensor in ((i, t) for i, layer in enumerate(layers) for t in layer):
            batch, heads, length, dim = tensor.shape
            same = (batch, heads, dim, tensor.dtype) == (1, self.kv_heads, self.head_dim, self.dtype)
            if not same or length < tokens:
                wanted = f"[1, {self.kv_heads}, >={tokens}, {self.head_dim}] {self.dtype}"
                raise InvalidArgument(
                    f"pack: layer {index} is {list(tensor.shape)} {tensor.dtype}, expected {wanted}"
                )
