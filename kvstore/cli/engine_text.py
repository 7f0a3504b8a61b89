"""Between text and ids: the tokenizer and chat template that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvstore.engine.weights import TOKEN_LISTS, metadata, open_gguf
from kvstore.errors import InvalidArgument

CONTROL = 3
"""Type of a token that is no text, in GGUF's lists."""
THOUGHT = "6f1c thought"
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class GgufCodec:
    """Byte-level BPE as GPT-2 has it, from the lists in a GGUF file."""

    tokenizer: Tokenizer
    template: jinja2.Template | None
    stop_ids: frozenset[int]

    @staticmethod
    def read(path: Path) -> GgufCodec:
        """Read a file's tokenizer.

        Errors: InvalidArgument when it is of another kind.
        """
        reader = open_gguf(path)
        plain = metadata(reader)
        if plain.get("tokenizer.ggml.model") != "gpt2":
            raise InvalidArgument(
                f"{path.name}: tokenizer {plain.get('tokenizer.ggml.model')!r} is not byte-level BPE; "
                "give token ids instead of text"
            )
        tokens, kinds, _, merges = (
            reader.fields[name].contents() if name in reader.fields else [] for name in TOKEN_LISTS
        )
        return GgufCodec(
            _bpe(tokens, kinds, merges, is_digit_split=plain.get("tokenizer.ggml.pre") == "smollm"),
            _template(plain),
            frozenset({plain["tokenizer.ggml.eos_token_id"]}),
        )

    @property
    def drops_thinking(self) -> bool:
        """Say whether the template leaves the thinking of earlier answers out, by trying it."""
        if self.template is None:
            return False
        answer = {"role": "assistant", "content": f"<think>{THOUGHT}</think>said"}
        history = [{"role": "user", "content": "ask"}, answer, {"role": "user", "content": "ask again"}]
        return THOUGHT not in self.template.render(messages=history, add_generation_prompt=True)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; special tokens in it are recognised."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation that the assistant is to continue.

        Errors: InvalidArgument when the file has no template.
        """
        if self.template is None:
            raise InvalidArgument("this model has no chat template; use generate")
        return self.encode(self.template.render(messages=messages, add_generation_prompt=True))


def _bpe(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], *, is_digit_split: bool
) -> Tokenizer:
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if is_digit_split else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _template(plain: dict[str, Any]) -> jinja2.Template | None:
    source = plain.get("tokenizer.chat_template")
    # A template is code from a file of unknown origin.
    return ImmutableSandboxedEnvironment().from_string(source) if source else None
