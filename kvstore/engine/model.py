"""One forward pass for decoders of the Llama and Gemma 3 families. It knows rows of tokens, no requests.

Rows of many sequences stand in one flat batch; what a row may see is the business of the attention that is
handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as functional

from kvstore.engine.config import Family, LayerKind, ModelConfig
from kvstore.engine.weights import LayerWeights, Weights


class Attention(Protocol):
    """Keeps keys and values of the rows of one step, and attends to them and all that came before."""

    def attend(self, layer: int, queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return what the rows gather at one layer.

        Shapes: queries [rows, heads, head_dim]; rows [rows, 2, kv_heads, head_dim], keys then values, keys
        rotated; result as queries.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The tokens of one step, sequences one after another.

    Shapes: ids i64[rows]; positions i64[rows], absolute; wanted i64[n], the rows whose logits are wanted.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor


class Model:
    """A decoder's weights and its forward pass.

    Threads: one forward at a time.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._frequencies = {
            kind: (1.0 / theta**exponents).to(weights.device)
            for kind, theta in ((LayerKind.FULL, config.theta), (LayerKind.WINDOW, config.local_theta))
        }

    @torch.inference_mode()
    def forward(
        self, rows: Rows, attention: Attention, *, before_layer: Callable[[int], None] = lambda _: None
    ) -> torch.Tensor:
        """Run rows through all layers and return the logits of the wanted ones.

        `before_layer` is called ahead of each layer: what loads may arrive until then.
        Shapes: result f32[wanted, vocabulary].
        """
        config, weights = self.config, self.weights
        hidden = functional.embedding(rows.ids, weights.embedding)
        if config.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(config.embedding_scale, dtype=hidden.dtype)
        turns = {kind: self._turns(kind, rows.positions) for kind in set(config.kinds)}
        for index, layer in enumerate(weights.layers):
            before_layer(index)
            hidden = hidden + self._attention(index, layer, hidden, turns[config.kinds[index]], attention)
            hidden = hidden + self._feed_forward(layer, hidden)
        last = self._norm(hidden[rows.wanted], weights.norm)
        return functional.linear(last, weights.head).float()

    def _turns(self, kind: LayerKind, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions.float()[:, None] * self._frequencies[kind][None]
        both = torch.cat([angles, angles], -1)[:, None]
        return both.cos().to(self.weights.dtype), both.sin().to(self.weights.dtype)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
    ) -> torch.Tensor:
        config, count = self.config, len(hidden)
        projected = functional.linear(self._norm(hidden, layer.attention_norm), layer.qkv)
        both = projected[:, : (config.heads + config.kv_heads) * config.head_dim]
        both = both.view(count, config.heads + config.kv_heads, config.head_dim)
        queries, keys = both[:, : config.heads], both[:, config.heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            both = torch.cat([self._norm(queries, layer.query_norm), self._norm(keys, layer.key_norm)], 1)
        both = _rotate(both, turns)
        values = projected[:, both.shape[1] * config.head_dim :]
        rows = projected.new_empty(count, 2, config.kv_heads, config.head_dim)
        rows[:, 0] = both[:, config.heads :]
        rows[:, 1] = values.view(count, config.kv_heads, config.head_dim)
        seen = attention.attend(index, both[:, : config.heads], rows)
        out = functional.linear(seen.reshape(count, -1), layer.output)
        return out if layer.post_attention_norm is None else self._norm(out, layer.post_attention_norm)

    def _feed_forward(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(self._norm(hidden, layer.ffn_norm), layer.gate_up).chunk(2, -1)
        if self.config.family is Family.GEMMA3:
            gate = functional.gelu(gate, approximate="tanh")
        else:
            gate = functional.silu(gate)
        out = functional.linear(gate * up, layer.down)
        return out if layer.post_ffn_norm is None else self._norm(out, layer.post_ffn_norm)

    def _norm(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = values.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.eps)
        if self.config.family is Family.GEMMA3:
            return (wide * weight).to(values.dtype)
        return weight.to(values.dtype) * wide.to(values.dtype)


def _rotate(values: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = turns
    left, right = values.chunk(2, -1)
    return values * cos + torch.cat([-right, left], -1) * sin
