"""What the demo talks about: a file of Python's own library, and questions that bring pieces of another."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import InvalidArgument

Encode = Callable[[str], list[int]]
TOKENS_MIN, TOKENS_MAX = 256, 7_000
DOCUMENT, EXCERPTS = "argparse", "textwrap"
SYSTEM = "You are a helpful programmer. Answer in one or two short sentences."
QUESTIONS = (
    "What is this module for?",
    "What does the piece above have to do with the module?",
    "Which of the two would you read first, and why?",
)
FOLLOW_UP_SHARE = 40
"""A follow-up brings one token for this many of the document: about 96 % of a later prompt is known."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids of a chat: `opening` is the first prompt, each follow-up comes behind the answer before it.

    `end` is the token that closes an answer.
    """

    opening: tuple[int, ...]
    follow_ups: tuple[tuple[int, ...], ...]
    end: int

    def next_prompt(self, prompt: tuple[int, ...], answer: tuple[int, ...], *, turn: int) -> tuple[int, ...]:
        """Return the prompt of the turn that follows turn number `turn`, counted from 1."""
        closed = answer if answer[-1] == self.end else (*answer, self.end)
        return (*prompt, *closed, *self.follow_ups[turn - 1])


def checked_length(tokens: int) -> int:
    """Return a length that the model can read, questions and answers included.

    Errors: InvalidArgument with the limits.
    """
    if not TOKENS_MIN <= tokens <= TOKENS_MAX:
        raise InvalidArgument(f"demo: --tokens must be {TOKENS_MIN}..{TOKENS_MAX}, got {tokens}")
    return tokens


def conversation(encode: Encode, *, tokens: int) -> Conversation:
    """Return the chat over the first `tokens` tokens of the document; always the same for one Python version.

    Errors: InvalidArgument when the library has no source here.
    """
    document = encode(_source(DOCUMENT))[:tokens]
    pieces = encode(_source(EXCERPTS))
    size = max(8, tokens // FOLLOW_UP_SHARE)
    first, *later = QUESTIONS
    head = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHere is {DOCUMENT}.py:\n"
    follow_ups = [
        (*encode("\n<|im_start|>user\n"), *pieces[i * size : (i + 1) * size], *encode(_asking(question)))
        for i, question in enumerate(later)
    ]
    opening = (*encode(head), *document, *encode(_asking(first)))
    return Conversation(opening, tuple(follow_ups), encode("<|im_end|>")[0])


def _asking(question: str) -> str:
    return f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    origin = Path(spec.origin) if spec and spec.origin else None
    if origin is None or origin.suffix != ".py":
        raise InvalidArgument(f"demo: the source of {module}.py is not installed with this Python")
    return origin.read_text(encoding="utf-8")
