"""vLLM: an engine looks prefixes up in kvstore, loads them, and leaves its own blocks behind.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "engine_adapters.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

Only `connector` imports vLLM, and only when the class is asked for. docs/vllm.md says what to expect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_adapters.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from engine_adapters.vllm import connector

        return getattr(connector, name)
    raise AttributeError(name)
