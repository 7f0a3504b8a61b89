"""The only file that knows transformers: a causal model behind tensors, its weights, caches and folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from engine_adapters.transformers.packing import KeysValues, KvShape
from kvstore.errors import InvalidArgument

_library: Any = transformers  # its annotations and its behaviour are two things
VERSION = f"transformers-{transformers.__version__}"
FULL_LAYER = "DynamicLayer"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """A causal language model, seen as token rows in, last logits and keys and values out.

    Threads: one request at a time, as the model itself.
    """

    model: Any
    shape: KvShape
    devices: tuple[torch.device, ...]

    @staticmethod
    def wrap(model: Any, *, block_tokens: int) -> EngineModel:
        """Run one token through `model` to see what its cache is really made of.

        Errors: InvalidArgument when the model is in training mode, or when a layer does not keep its full
        history as plain keys and values.
        """
        if getattr(model, "training", False):
            raise InvalidArgument("prefix cache: the model is in training mode, call model.eval() first")
        cache = _library.DynamicCache(config=model.config)
        _refuse_other_layers(cache)
        with torch.no_grad():
            model(
                torch.zeros((1, 1), dtype=torch.long, device=model.device),
                past_key_values=cache,
                use_cache=True,
            )
        _refuse_other_layers(cache)
        keys, values = cache.layers[0].keys, cache.layers[0].values
        if keys.shape != values.shape:
            raise InvalidArgument(
                f"prefix cache: keys {list(keys.shape)} and values {list(values.shape)} differ in shape"
            )
        shape = KvShape(
            layers=len(cache.layers),
            kv_heads=keys.shape[1],
            head_dim=keys.shape[3],
            dtype=keys.dtype,
            block_tokens=block_tokens,
        )
        return EngineModel(
            model=model, shape=shape, devices=tuple(layer.keys.device for layer in cache.layers)
        )

    @property
    def config(self) -> dict[str, Any]:
        """The model's config as plain values."""
        plain: dict[str, Any] = self.model.config.to_dict()
        return plain

    @property
    def name(self) -> str:
        """Architecture of the model; what its weights are is said by their fingerprint."""
        return type(self.model).__name__

    @property
    def attention(self) -> str:
        """Attention implementation in use."""
        return str(getattr(self.model.config, "_attn_implementation", "") or "eager")

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return _stop_ids(self.model)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter and persistent buffer with its name."""
        yield from self.model.state_dict().items()

    def resume(self, layers: Sequence[KeysValues]) -> Any:
        """Return a cache object that holds `layers` as its past; an empty one for no layers.

        The tensors become the cache's own: it grows by concatenation and never writes into them.
        """
        cache = _library.DynamicCache(config=self.model.config)
        for layer, (keys, values) in zip(cache.layers, layers, strict=False):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache

    def forward(self, ids: Sequence[int], past: Any) -> torch.Tensor:
        """Compute `ids` behind `past`, which grows; return the last token's logits, shape [vocabulary]."""
        rows = torch.tensor([list(ids)], dtype=torch.long, device=self.model.device)
        with torch.no_grad():
            output = self.model(rows, past_key_values=past, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    @staticmethod
    def layers(past: Any) -> list[KeysValues]:
        """Return the keys and values that a cache object holds, without a copy."""
        return [(layer.keys, layer.values) for layer in past.layers]

    @staticmethod
    def length(past: Any) -> int:
        """Return how many tokens a cache object holds."""
        return int(past.get_seq_length())


def _refuse_other_layers(cache: Any) -> None:
    """Refuse what is no plain full-history layer, by name."""
    for index, layer in enumerate(cache.layers):
        if type(layer).__name__ != FULL_LAYER:
            raise InvalidArgument(
                f"prefix cache: layer {index} of {len(cache.layers)} is a {type(layer).__name__}; only "
                f"layers that keep their full history ({FULL_LAYER}) can be stored"
            )


def _stop_ids(model: Any) -> frozenset[int]:
    for config in (getattr(model, "generation_config", None), model.config):
        stop = getattr(config, "eos_token_id", None)
        if stop is not None:
            return frozenset([stop] if isinstance(stop, int) else stop)
    return frozenset()


def generate_without_store(
    model: Any, ids: Sequence[int], *, max_new_tokens: int, on_token: Callable[[], None]
) -> list[int]:
    """Answer greedily with the library's own `generate` and nothing of ours: the yardstick.

    `on_token` is called behind each new token.
    """

    class Watch:
        """Hears of the prompt first, then of every token."""

        prompt_seen = False

        def put(self, _: object) -> None:
            if self.prompt_seen:
                on_token()
            self.prompt_seen = True

        def end(self) -> None:
            pass

    rows = torch.tensor([list(ids)], dtype=torch.long, device=model.device)
    with torch.no_grad():
        answer = model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=min(_stop_ids(model), default=0),
            streamer=Watch(),
        )
    new: list[int] = answer[0, len(ids) :].tolist()
    return new


def load_model(folder: Path, *, dtype: torch.dtype) -> Any:
    """Load a causal model from a local folder, ready to answer; never asks a hub."""
    _library.utils.logging.disable_progress_bar()
    return _library.AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=dtype, local_files_only=True
    ).eval()


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a local folder."""
    return _library.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a plain folder: weights as bfloat16 safetensors, config and tokenizer.

    What the library loads from GGUF is tagged as quantised and refuses to be saved: its weights move into a
    clean model.
    Errors: InvalidArgument when the file holds tensors that the architecture does not know, or lacks some.
    """
    _library.utils.logging.disable_progress_bar()
    tokenizer = _library.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    loaded = _library.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    plain = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "torch_dtype", "dtype"):
        plain.pop(key, None)
    clean = type(loaded)(type(loaded.config).from_dict(plain))
    result = clean.load_state_dict(loaded.state_dict(), strict=False)
    if result.unexpected_keys or not set(result.missing_keys) <= {"lm_head.weight"}:
        raise InvalidArgument(
            f"{gguf.name}: unexpected {result.unexpected_keys}, missing {result.missing_keys}"
        )
    clean.tie_weights()
    clean.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
