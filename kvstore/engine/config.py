"""What a model is made of: the sizes and rules that the forward pass needs, without any weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvstore.errors import InvalidArgument

GEMMA_LOCAL_THETA = 10000.0
GEMMA_GLOBAL_EVERY = 6
"""Neither stands in a Gemma 3 file: every sixth layer sees everything, the others a window."""


class LayerKind(StrEnum):
    """What a token sees in a layer: all before it, or the last `window` tokens, itself included."""

    FULL = "full"
    WINDOW = "window"


class Family(StrEnum):
    """Architectures that the forward pass knows."""

    LLAMA = "llama"
    GEMMA3 = "gemma3"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and rules of a decoder.

    Units: window in tokens, 0 without window layers. A key of layer kind WINDOW is rotated by `local_theta`.
    """

    name: str
    family: Family
    kinds: tuple[LayerKind, ...]
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    local_theta: float
    window: int = 0
    context_tokens: int = 8192

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.kinds)

    @property
    def embedding_scale(self) -> float:
        """Gemma multiplies what it embeds by the root of its width."""
        return self.dim**0.5 if self.family is Family.GEMMA3 else 1.0

    @property
    def row_width(self) -> int:
        """Numbers that one layer keeps of one token: its key and its value."""
        return 2 * self.kv_heads * self.head_dim

    def of_kind(self, kind: LayerKind) -> tuple[int, ...]:
        """Indexes of the layers of one kind."""
        return tuple(index for index, own in enumerate(self.kinds) if own is kind)

    def checked(self) -> ModelConfig:
        """Return self after checking it.

        Errors: InvalidArgument naming the rule and the values.
        """
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise InvalidArgument(
                f"model {self.name!r}: {self.heads} heads do not share {self.kv_heads} KV heads of "
                f"{self.head_dim} dimensions"
            )
        if (LayerKind.WINDOW in self.kinds) != (self.window > 0):
            raise InvalidArgument(f"model {self.name!r}: window layers and window {self.window} do not fit")
        return self

    @staticmethod
    def from_gguf(fields: Mapping[str, Any]) -> ModelConfig:
        """Read the metadata of a GGUF file.

        Errors: InvalidArgument on an architecture that is not known, or a field that is missing.
        """
        try:
            family = Family(fields["general.architecture"])
        except (KeyError, ValueError) as error:
            raise InvalidArgument(
                f"model: architecture {fields.get('general.architecture')!r} is not one of "
                f"{', '.join(Family)}"
            ) from error
        own = {key.removeprefix(f"{family}."): value for key, value in fields.items()}
        try:
            return _read(family, own)
        except KeyError as error:
            raise InvalidArgument(f"model: the file lacks {family}.{error.args[0]}") from error


def _read(family: Family, own: Mapping[str, Any]) -> ModelConfig:
    layers, heads, dim = own["block_count"], own["attention.head_count"], own["embedding_length"]
    theta = float(own.get("rope.freq_base", 10000.0))
    is_gemma = family is Family.GEMMA3
    return ModelConfig(
        name=own.get("general.name", family),
        family=family,
        kinds=tuple(
            LayerKind.WINDOW if is_gemma and (index + 1) % GEMMA_GLOBAL_EVERY else LayerKind.FULL
            for index in range(layers)
        ),
        dim=dim,
        heads=heads,
        kv_heads=own["attention.head_count_kv"],
        head_dim=own.get("attention.key_length", dim // heads),
        eps=own["attention.layer_norm_rms_epsilon"],
        theta=theta,
        local_theta=GEMMA_LOCAL_THETA if is_gemma else theta,
        window=own["attention.sliding_window"] if is_gemma else 0,
        context_tokens=own.get("context_length", 8192),
    ).checked()
