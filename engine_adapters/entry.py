"""What is known of an engine without importing it; every adapter has an `entry` module with its ENTRY."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import engine_adapters
from kvstore.errors import InvalidArgument
from kvstore.namespace import Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An engine and its adapter.

    `distributions` are the packages that bring the engine, one of them is enough; `tested` the minor versions
    that the adapter's tests run with; `adapter` the module that imports the engine. `sample` returns a
    namespace whose layout is that of a small model's blocks in this engine; it may import what the adapter
    needs.
    """

    name: str
    distributions: tuple[str, ...]
    tested: tuple[str, ...]
    adapter: str
    sample: Callable[[], Namespace]


def names() -> list[str]:
    """Return the engines that have an adapter here."""
    packages = [module.name for module in pkgutil.iter_modules(engine_adapters.__path__) if module.ispkg]
    return sorted(name for name in packages if importlib.util.find_spec(f"engine_adapters.{name}.entry"))


def entry_of(name: str) -> Entry:
    """Return an engine's entry.

    Errors: InvalidArgument naming those that there are.
    """
    if name not in names():
        raise InvalidArgument(f"engine {name!r} has no adapter here; there are {', '.join(names())}")
    entry: Entry = importlib.import_module(f"engine_adapters.{name}.entry").ENTRY
    return entry
