"""The conformance and fault suite for engine adapters: subclass AdapterSuite, start your engine, run pytest.

Needs the `daemon` extra and pytest; the engine may live in another environment. docs/adapters.md shows how.
"""

from kvstore.testing.adapter_suite.harness import Answer, Cancellable, Cancelled, Engine
from kvstore.testing.adapter_suite.stage import Sizes, Stage
from kvstore.testing.adapter_suite.suite import AdapterSuite

__all__ = ["AdapterSuite", "Answer", "Cancellable", "Cancelled", "Engine", "Sizes", "Stage"]
