"""What the rows of a step may see: pages of the pool in full layers, a window of their own in the others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from kvstore.engine.config import LayerKind, ModelConfig
from kvstore.engine.model import Rows
from kvstore.engine.pool import KvPool
from kvstore.engine.windows import WindowRows


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a step: tokens [first, first + count) of it, kept in `pages`."""

    first: int
    count: int
    pages: Sequence[int]
    window: WindowRows


def rows_of(
    ids: Sequence[Sequence[int]], spans: Sequence[Span], *, device: torch.device, rows_min: int = 1
) -> Rows:
    """Return the tokens of some spans, the last of each wanted; up to `rows_min` of each kind there are rows
    of nobody, that attend to nothing.
    """
    ends = list(itertools.accumulate(span.count for span in spans))
    idle = [0] * max(0, rows_min - ends[-1])
    unread = [0] * max(0, rows_min - len(spans))
    positions = [torch.arange(span.first, span.first + span.count) for span in spans]
    return Rows(
        torch.tensor([*itertools.chain(*ids), *idle], device=device),
        torch.cat([*positions, torch.tensor(idle, dtype=torch.long)]).to(device),
        torch.tensor([*(end - 1 for end in ends), *unread], device=device),
    )


class StepAttention:
    """Attention of one step over many sequences. Everything that is the same in all layers is made once.

    Implements kvstore.engine.model.Attention.
    """

    def __init__(self, config: ModelConfig, pool: KvPool, spans: Sequence[Span], dtype: torch.dtype) -> None:
        self._config = config
        self._pool = pool
        self._spans = spans
        self._scale = config.head_dim**-0.5
        device = pool.rows(pool.layers[0]).device
        self._new = [_on(pool.slots(s.pages, s.first, s.first + s.count), device) for s in spans]
        self._all = [_on(pool.slots(s.pages, 0, s.first + s.count), device) for s in spans]
        self._masks = [_causal(span, dtype, device) for span in spans]
        self._window_masks = (
            [_windowed(span, config.window, dtype, device) for span in spans] if config.window else []
        )

    def attend(self, layer: int, queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Keep the new rows and return what every row gathers."""
        out = torch.zeros_like(queries)
        is_full = self._config.kinds[layer] is LayerKind.FULL
        start = 0
        for index, span in enumerate(self._spans):
            here = slice(start, start + span.count)
            if is_full:
                out[here] = self._full(layer, index, queries[here], rows[here])
            else:
                out[here] = self._window(layer, index, queries[here], rows[here])
            start += span.count
        return out

    def _full(self, layer: int, index: int, queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        kept = self._pool.rows(layer)
        kept[self._new[index]] = rows
        where = self._all[index]
        seen = kept[where] if isinstance(where, slice) else kept.index_select(0, where)
        return self._gather(queries, seen, self._masks[index])

    def _window(self, layer: int, index: int, queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        window = self._spans[index].window
        past = window.rows.get(layer)
        seen = rows if past is None else torch.cat([past, rows])
        window.rows[layer] = seen[-(self._config.window - 1) :].clone()
        return self._gather(queries, seen, self._window_masks[index])

    def _gather(self, queries: torch.Tensor, seen: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        keys, values = seen[:, 0].transpose(0, 1)[None], seen[:, 1].transpose(0, 1)[None]
        if len(queries) == 1:
            # Heads that share keys go as rows of one product: the keys are read once.
            together = queries.view(1, self._config.kv_heads, -1, self._config.head_dim)
            result = functional.scaled_dot_product_attention(together, keys, values, scale=self._scale)
            return result.reshape(queries.shape)
        result = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=self._config.heads != self._config.kv_heads,
        )
        return result[0].transpose(0, 1)


def _on(slots: torch.Tensor | slice, device: torch.device) -> torch.Tensor | slice:
    return slots if isinstance(slots, slice) else slots.to(device)


def _causal(span: Span, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Return what a span's rows may not see as -inf; None where causality alone says it."""
    if span.first == 0 or span.count == 1:
        return None
    return _forbid(_distance(span, span.first + span.count, device) < 0, dtype)


def _windowed(span: Span, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    past = min(span.first, window - 1)
    if past + span.count <= window and (past == 0 or span.count == 1):
        return None
    distance = _distance(span, past + span.count, device)
    return _forbid((distance < 0) | (distance >= window), dtype)


def _distance(span: Span, seen: int, device: torch.device) -> torch.Tensor:
    """Return how far behind each row each of the `seen` keys lies; the last key is the last row."""
    last = torch.arange(seen - span.count, seen, device=device)
    return last[:, None] - torch.arange(seen, device=device)[None]


def _forbid(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
