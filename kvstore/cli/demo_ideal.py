"""The arithmetic ideal of a prefix hit: how much less there is to compute when the cache costs nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What the arithmetic of a prefill depends on.

    Units: parameters of all layers together without embeddings; `head_parameters` are those of the output
    head, which one row passes through.
    """

    layers: int
    heads: int
    head_dim: int
    layer_parameters: int
    head_parameters: int

    def flops(self, *, tokens: int, known: int = 0) -> int:
        """Return the operations of a prefill of `tokens` tokens of which the first `known` are in the cache.

        A row at position p attends to p + 1 keys: two products of head_dim per head and key.
        """
        rows = tokens - known
        attended = (tokens * (tokens + 1) - known * (known + 1)) // 2
        attention = 4 * self.layers * self.heads * self.head_dim * attended
        return 2 * self.layer_parameters * rows + attention + 2 * self.head_parameters

    def speed_up(self, *, tokens: int, known: int) -> float:
        """Return how many times faster a prefill could be: it still attends to the whole prefix."""
        return self.flops(tokens=tokens) / self.flops(tokens=tokens, known=known)
