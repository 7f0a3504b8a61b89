"""Prefill and decode apart: one worker computes the prompt, another finds it in the daemon and goes on.

Any worker can do both, so a request is lost only when no worker is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvstore.engine.request import Answer, Request, Usage
from kvstore.engine.worker import OnToken, Worker
from kvstore.errors import TierUnavailable

REQUESTS_AT_ONCE = 64
SUMMED = ("computed", "generated", "fallbacks", "preemptions", "seconds", "load_seconds", "load_wait_seconds")


class PrefillDecode:
    """Sends prompts to prefill workers in turn and what follows to decode workers. Itself a Worker."""

    def __init__(self, prefill: Sequence[Worker], decode: Sequence[Worker]) -> None:
        self._prefill = tuple(prefill)
        self._decode = tuple(decode)
        self._turn = 0
        self._threads = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="engine-pair")

    def submit(self, request: Request, *, on_token: OnToken = lambda _: None) -> Future[Answer]:
        """Start a request."""
        self._turn += 1
        return self._threads.submit(self._run, request, on_token, self._turn)

    def _run(self, request: Request, on_token: OnToken, turn: int) -> Answer:
        first = dataclasses.replace(request, max_new_tokens=1)
        begun = _first_alive(_from(self._prefill, turn) + _from(self._decode, turn), first)
        on_token(begun.ids[0])
        if request.max_new_tokens == 1 or begun.ended_by == "stop":
            return begun
        rest = dataclasses.replace(
            request,
            prompt=(*request.prompt, *begun.ids),
            max_new_tokens=request.max_new_tokens - 1,
            save_prompt=False,  # the prefill worker did
        )
        follow = _first_alive(_from(self._decode, turn) + _from(self._prefill, turn), rest, on_token)
        return Answer((*begun.ids, *follow.ids), _joined(begun.usage, follow.usage), follow.ended_by)


def _from(workers: tuple[Worker, ...], turn: int) -> tuple[Worker, ...]:
    return workers[turn % len(workers) :] + workers[: turn % len(workers)] if workers else ()


def _first_alive(workers: Sequence[Worker], request: Request, on_token: OnToken = lambda _: None) -> Answer:
    """Return the answer of the first worker that lives to give it. Tokens are told once: a retry says the
    same ones again, since a draw depends on (seed, position) alone.

    Errors: TierUnavailable of the last worker when none does.
    """
    told = 0
    gone = TierUnavailable("no worker is configured")
    for worker in workers:
        seen = 0

        def tell(token: int) -> None:
            nonlocal told, seen
            seen += 1
            if seen > told:
                told = seen
                on_token(token)

        try:
            return worker.submit(request, on_token=tell).result()
        except TierUnavailable as error:
            gone = error
    raise gone


def _joined(prefill: Usage, decode: Usage) -> Usage:
    """Return one account: the prompt as the prefill worker found it, the rest from the decode worker."""
    sums = {name: getattr(prefill, name) + getattr(decode, name) for name in SUMMED}
    return dataclasses.replace(prefill, **sums)
