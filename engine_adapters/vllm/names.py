"""The namespaces of one engine: its own, and one for each LoRA adapter that requests bring."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_adapters.vllm.tracked import Names
from engine_adapters.vllm.weights import adapter_fingerprint
from kvstore.namespace import Namespace
from kvstore.types import ReleaseOutcome

if TYPE_CHECKING:
    from kvstore.client import Client, Match

_log = logging.getLogger(__name__)


class NameBook:
    """Opens namespaces, and does in the background what the scheduler must not wait for.

    `build` returns the engine's namespace, given an adapter's fingerprint and a generation of the weights.
    Errors: LayoutMismatch when the store knows the engine's namespace with other bytes.
    """

    def __init__(
        self, client: Client, build: Callable[[str, str], Namespace], *, retention_class: str
    ) -> None:
        self._client = client
        self._build = build
        self._retention_class = retention_class
        self._generation = ""
        self._own = self._open("")
        self.block_tokens = self._own.opened.namespace.block_tokens
        self._adapters: dict[tuple[int, str], Future[Names]] = {}
        self._background = ThreadPoolExecutor(1, thread_name_prefix="kvstore-names")

    @property
    def namespace(self) -> Namespace:
        """The engine's own namespace, without an adapter."""
        return self._own.opened.namespace

    @property
    def where(self) -> str:
        """Where the store is, and whether it answers."""
        return f"{self._client.address} {'connected' if self._client.connected else 'not connected'}"

    def rename(self, generation: str) -> None:
        """From now on names are others: what was stored before is not found."""
        self._generation = generation
        self._own = self._open("")
        self._adapters.clear()

    def of(self, lora: Any) -> Names | None:
        """Return the names of a request's blocks; None while its adapter's files are being digested.

        vLLM's hashes know an adapter by its name only; its content is what changes the bytes.
        """
        if lora is None:
            return self._own
        key = (lora.lora_int_id, lora.lora_path)
        future = self._adapters.get(key)
        if future is None:
            future = self._background.submit(self._adapter, lora.lora_path)
            self._adapters[key] = future
        if not future.done() or future.exception() is not None:
            return None
        return future.result()

    def touch(self, names: Names, keys: bytes, retention_class: str) -> None:
        """Keep a prefix alive, later."""
        self._background.submit(names.opened.touch, keys, retention_class)

    def release(self, match: Match, *, used: int, outcome: ReleaseOutcome) -> None:
        """Give a lease back; a lease says itself whose it is."""
        self._own.opened.release(match, used=used, outcome=outcome)

    def close(self) -> None:
        """Disconnect."""
        self._background.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _adapter(self, path: str) -> Names:
        try:
            return self._open(adapter_fingerprint(Path(path)))
        except Exception:
            _log.exception("event=vllm_adapter_not_stored path=%s", path)
            raise

    def _open(self, adapter: str) -> Names:
        namespace = self._build(adapter, self._generation)
        opened = self._client.open(namespace, retention_class=self._retention_class)
        return Names(opened, namespace.canonical())
