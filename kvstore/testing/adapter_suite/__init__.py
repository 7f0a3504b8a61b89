"""The conformance and fault suite for engine adapters: subclass AdapterSuite, start your engine, run pytest.

Needs the `daemon` extra and pytest. The engine may live in another environment, where `process` needs the
base install alone. docs/adapters.md shows how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.testing.adapter_suite.stage import Sizes
    from kvstore.testing.adapter_suite.suite import AdapterSuite

from kvstore.testing.adapter_suite.harness import Answer, Cancellable, Cancelled, Engine

__all__ = ["AdapterSuite", "Answer", "Cancellable", "Cancelled", "Engine", "Sizes"]


def __getattr__(name: str) -> object:
    # The engine's environment has neither pytest nor the daemon.
    if name in __all__:
        from kvstore.testing.adapter_suite import stage, suite

        return getattr(suite if hasattr(suite, name) else stage, name)
    raise AttributeError(name)
