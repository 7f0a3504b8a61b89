"""The engine's paged KV memory, seen as rows of opaque bytes: one row a block in each tensor.

What the bytes mean depends on kernel and instruction set; nothing here looks inside a block.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kvstore.copying import Bytes
from kvstore.errors import InvalidArgument


class KvMemory(Protocol):
    """Moves whole blocks between the engine's memory and staging rows.

    Shapes: staging rows are [blocks, block_bytes]; a row holds the block of every tensor, in their order.
    Threads: any number, on different blocks.
    """

    row_bytes: tuple[int, ...]

    def staging(self, blocks: int) -> Bytes:
        """Return touched host memory for that many blocks."""
        ...

    def fence(self) -> Any:
        """Mark what the engine has been told to compute so far; for `gather`."""
        ...

    def gather(self, block_ids: Sequence[int], into: Bytes, *, after: Any) -> None:
        """Copy blocks out into the first rows of `into`, when what `after` marks is computed."""
        ...

    def scatter(self, source: Bytes, block_ids: Sequence[int]) -> None:
        """Copy the rows of `source` into blocks; done on return."""
        ...


def kv_memory(tensors: Sequence[torch.Tensor], *, num_blocks: int) -> KvMemory:
    """Return the memory behind the engine's KV tensors.

    Errors: InvalidArgument when a block is no contiguous stretch of each tensor.
    """
    rows = [row for index, tensor in enumerate(tensors) for row in block_rows(tensor, num_blocks, index)]
    if not rows:
        raise InvalidArgument("vllm adapter: the engine registered no KV tensor")
    if rows[0].device.type == "cpu":
        return HostMemory([row.numpy() for row in rows])
    return DeviceMemory(rows)


def block_rows(tensor: torch.Tensor, num_blocks: int, index: int) -> list[torch.Tensor]:
    """Return a KV tensor as byte rows [num_blocks, bytes], or as two where keys and values lie apart.

    Kernels may use smaller blocks than the engine; then several of theirs make a row.
    Errors: InvalidArgument as `kv_memory`.
    """
    if tensor.dim() > 1 and tensor.shape[0] == 2 != num_blocks and tensor.shape[1] % num_blocks == 0:
        return [_rows(half, num_blocks, index) for half in (tensor[0], tensor[1])]
    return [_rows(tensor, num_blocks, index)]


def _rows(tensor: torch.Tensor, num_blocks: int, index: int) -> torch.Tensor:
    per_block, rest = divmod(tensor.shape[0], num_blocks)
    inner = tensor[0].numel()
    is_dense = _extent(tensor) == inner and (per_block == 1 or tensor.stride(0) == inner)
    if rest or not per_block or not is_dense:
        raise InvalidArgument(
            f"vllm adapter: KV tensor {index} has shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())}; each of {num_blocks} blocks must be one stretch of memory"
        )
    size = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * size,
        (num_blocks, per_block * inner * size),
        (per_block * tensor.stride(0) * size, 1),
    )


def _extent(tensor: torch.Tensor) -> int:
    """Return over how many elements the first block of a tensor is spread, holes included."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    )


class HostMemory:
    """KV tensors of a CPU engine. Plain copies: torch's own would wake the threads that compute."""

    def __init__(self, rows: Sequence[Bytes]) -> None:
        self._rows = rows
        self.row_bytes = tuple(row.shape[1] for row in rows)
        self._edges = [0, *itertools.accumulate(self.row_bytes)]

    def staging(self, blocks: int) -> Bytes:
        """As KvMemory."""
        rows = np.empty((blocks, self._edges[-1]), np.uint8)
        rows.fill(0)  # a first touch costs more than a copy
        return rows

    def fence(self) -> None:
        """As KvMemory; a CPU engine has computed when it returns."""

    def gather(self, block_ids: Sequence[int], into: Bytes, *, after: Any) -> None:
        """As KvMemory."""
        for row, block in enumerate(block_ids):
            for tensor, (start, end) in zip(self._rows, itertools.pairwise(self._edges), strict=True):
                np.copyto(into[row, start:end], tensor[block])

    def scatter(self, source: Bytes, block_ids: Sequence[int]) -> None:
        """As KvMemory."""
        for row, block in enumerate(block_ids):
            for tensor, (start, end) in zip(self._rows, itertools.pairwise(self._edges), strict=True):
                np.copyto(tensor[block], source[row, start:end])


class DeviceMemory:
    """KV tensors of an accelerator: pinned staging, and a stream of its own for each direction."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self._rows = rows
        self.row_bytes = tuple(row.shape[1] for row in rows)
        self._edges = [0, *itertools.accumulate(self.row_bytes)]
        self._device = rows[0].device
        self._module: Any = torch.get_device_module(self._device)
        self._outward = self._module.Stream(device=self._device)
        self._inward = self._module.Stream(device=self._device)

    def staging(self, blocks: int) -> Bytes:
        """As KvMemory."""
        pinned = torch.zeros((blocks, self._edges[-1]), dtype=torch.uint8, pin_memory=True)
        rows: Bytes = pinned.numpy()
        return rows

    def fence(self) -> Any:
        """As KvMemory: an event on the stream that computes."""
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def gather(self, block_ids: Sequence[int], into: Bytes, *, after: Any) -> None:
        """As KvMemory."""
        staged = torch.from_numpy(into)[: len(block_ids)]
        with self._on(self._outward):
            self._outward.wait_event(after)
            wanted = torch.tensor(block_ids, device=self._device)
            for tensor, (start, end) in zip(self._rows, itertools.pairwise(self._edges), strict=True):
                staged[:, start:end].copy_(tensor.index_select(0, wanted), non_blocking=True)
            self._outward.synchronize()

    def scatter(self, source: Bytes, block_ids: Sequence[int]) -> None:
        """As KvMemory."""
        staged = torch.from_numpy(source)
        with self._on(self._inward):
            wanted = torch.tensor(block_ids, device=self._device)
            for tensor, (start, end) in zip(self._rows, itertools.pairwise(self._edges), strict=True):
                tensor.index_copy_(0, wanted, staged[:, start:end].to(self._device, non_blocking=True))
            self._inward.synchronize()

    def _on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        guard: contextlib.AbstractContextManager[Any] = self._module.stream(stream)
        return guard
