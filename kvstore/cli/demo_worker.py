"""An inference worker of the demo, a process of its own: one JSON command a line in, one answer a line out.

Run as `python -m kvstore.cli.demo_worker`. It holds one model and, once opened, one prefix cache.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import IO, Any

import numpy as np

from kvstore.errors import KVStoreError

MATCH_SECONDS_MAX = 0.25
"""A scheduler gives a match 20 ms; a small machine that runs all of this at once may need more."""
FETCH_SECONDS_MAX = 30.0
"""The adapter gives up sooner, when computing would have been as fast."""
WARM_UP_ROWS = 64
WARM_UP_BYTES = 512 << 20
"""Memory that a virtual machine has never used costs more at first touch than any copy; a worker that
has served a request has that behind itself. So every worker touches some and frees it, also without store."""


class Worker:
    """One model in one process, with or without a store."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._model: Any = None
        self._tokenizer: Any = None
        self._cache: Any = None

    def say(self, **message: Any) -> None:
        """Send one line."""
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def load(self, *, dtype: str) -> dict[str, Any]:
        """Load SmolLM2 and compute a little, so that no later time contains a first call's cost."""
        began = time.monotonic()
        import torch

        from engine_adapters.transformers import smollm2
        from engine_adapters.transformers.engine import EngineModel

        torch.set_num_threads(1)
        self._model, self._tokenizer = smollm2.load(lambda text: self.say(progress=text), dtype=dtype)
        engine = EngineModel.wrap(self._model, block_tokens=1)
        past = engine.resume([])
        engine.forward(range(WARM_UP_ROWS), past)
        engine.forward([0], past)
        np.empty(WARM_UP_BYTES, np.uint8).fill(0)
        config = self._model.config
        layers = sum(p.numel() for p in self._model.model.layers.parameters())
        return {
            "seconds": time.monotonic() - began,
            "token_bytes": engine.shape.block_bytes,
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "head_dim": engine.shape.head_dim,
            "layer_parameters": layers,
            "head_parameters": config.vocab_size * config.hidden_size,
        }

    def conversation(self, *, tokens: int) -> dict[str, Any]:
        """Return the token ids of the chat."""
        from kvstore.cli.demo_text import conversation

        def encode(text: str) -> list[int]:
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids

        chat = conversation(encode, tokens=tokens)
        return {"opening": chat.opening, "follow_ups": chat.follow_ups, "end": chat.end}

    def plain(self, *, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        """Answer with the library alone."""
        from engine_adapters.transformers.engine import generate_without_store

        times: list[float] = []
        began = time.monotonic()
        ids = generate_without_store(
            self._model,
            prompt,
            max_new_tokens=max_new_tokens,
            on_token=lambda: times.append(time.monotonic() - began),
        )
        return {"ids": ids, "first_token_seconds": times[0], "seconds": times[-1], "text": self._text(ids)}

    def open(self, *, address: str, block_tokens: int, staging_bytes: int) -> dict[str, Any]:
        """Connect to the daemon and open the model's namespace."""
        from engine_adapters.transformers import PrefixCache
        from kvstore.client import Client

        self._cache = PrefixCache(
            self._model,
            Client(address),
            block_tokens=block_tokens,
            model_name="SmolLM2-135M-Instruct",
            match_seconds_max=MATCH_SECONDS_MAX,
            fetch_seconds_max=FETCH_SECONDS_MAX,
            staging_bytes=staging_bytes,
        )
        return {"fingerprint": self._cache.namespace.fingerprint.hex()}

    def ask(self, *, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        """Answer through the store."""
        from engine_adapters.transformers.prefix_cache import hit_blocks

        result = self._cache.generate(prompt, max_new_tokens=max_new_tokens)
        steps = result.prefill
        return {
            "ids": result.ids,
            "text": self._text(result.ids),
            "prompt_tokens": result.prompt_tokens,
            "hit_tokens": result.hit_tokens,
            "tiers": hit_blocks(result.tiers),
            "reason": steps.reason and str(steps.reason),
            "first_token_seconds": result.first_token_seconds,
            "seconds": result.seconds,
            "steps_seconds": {
                "match": steps.match_seconds,
                "fetch": steps.fetch_seconds,
                "inject": steps.inject_seconds,
                "compute": steps.compute_seconds,
                "save": result.prompt_saved.seconds + result.answer_saved.seconds,
            },
            "stored_blocks": result.prompt_saved.stored + result.answer_saved.stored,
            "unsaved_reason": next(
                (str(s.reason) for s in (result.prompt_saved, result.answer_saved) if s.reason), None
            ),
            "keys": result.keys.hex(),
        }

    def _text(self, ids: Any) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text.strip()


def serve(commands: IO[str], worker: Worker) -> None:
    """Answer until the commands end; a broken promise of ours goes back as its message."""
    verbs = {
        verb.__name__: verb
        for verb in (worker.load, worker.conversation, worker.plain, worker.open, worker.ask)
    }
    for line in commands:
        command = json.loads(line)
        try:
            worker.say(answer=verbs[command.pop("do")](**command))
        except KVStoreError as error:
            worker.say(error=str(error))


def main() -> None:
    """Keep the real stdout for answers, and send whatever a library prints to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, Worker(answers))


if __name__ == "__main__":
    main()
