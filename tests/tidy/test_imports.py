"""Imports point one way, and heavy or foreign packages stay in the one place that needs them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import pytest

from tests.tidy.tree import ROOT, Source, imports, parse, product_sources, report, within

OPERATION = ("kvstore.settings", "kvstore.log", "kvstore.metrics")
# Every other module that lies directly in kvstore/ is foundation, and held to the base install below.
FOUNDATION = tuple(
    module
    for module in (f"kvstore.{path.stem}" for path in sorted((ROOT / "kvstore").glob("*.py")))
    if module not in ("kvstore.__init__", *OPERATION)
)
RPC, CLIENT, TIERS, CORE = ("kvstore.rpc",), ("kvstore.client",), ("kvstore.tiers",), ("kvstore.core",)
SERVICE, CLI, ADAPTERS = ("kvstore.service",), ("kvstore.cli",), ("engine_adapters",)
# Demo and bench run the whole thing, so they may see all of it.
DEMO = ("kvstore.cli.demo*", "kvstore.cli.bench*", "kvstore.bench")

# What each part may import of ours, the narrowest part first. A module that no row names fails the test.
MAY_IMPORT: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (FOUNDATION, FOUNDATION),
    (OPERATION, FOUNDATION + OPERATION),
    (RPC, FOUNDATION + RPC),
    (CLIENT, FOUNDATION + RPC + CLIENT),
    (TIERS, FOUNDATION + OPERATION + TIERS),
    # It plays with a whole daemon.
    (("kvstore.testing.adapter_suite",), ("kvstore",)),
    (("kvstore.testing",), (*FOUNDATION, "kvstore.tiers.base", "kvstore.testing")),
    (CORE, (*FOUNDATION, "kvstore.tiers.base", *CORE)),
    (SERVICE, FOUNDATION + OPERATION + RPC + TIERS + CORE + SERVICE),
    (DEMO, ("kvstore", *ADAPTERS)),
    (CLI, ("kvstore",)),
    (
        ("kvstore.engine",),
        (*FOUNDATION, *CLIENT, *CORE, "kvstore.tiers.base", "kvstore.tiers.hbm", "kvstore.engine"),
    ),
    (("kvstore.trace",), (*FOUNDATION, *CORE, "kvstore.tiers.base", "kvstore.trace")),
    (ADAPTERS, FOUNDATION + CLIENT + ADAPTERS),
)
# The base install has these and nothing else; everything that an engine imports must live on them.
BASE = FOUNDATION + RPC + CLIENT
BASE_PACKAGES = ("grpc", "google.protobuf", "numpy", "xxhash")
# A package that only some places may import.
CONFINED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("asyncio", "grpc.aio"), SERVICE + CLI + DEMO),
    (("torch",), ("kvstore.engine", "kvstore.tiers.hbm", *ADAPTERS, *DEMO)),
    (("lmdb",), TIERS + CLI + DEMO),
    (("cryptography",), ("kvstore.tiers.ssd.crypto*",)),
    (("pydantic",), OPERATION + SERVICE + CLI),
    (("typer", "rich"), CLI + DEMO),
    (("prometheus_client",), (*OPERATION, *SERVICE)),
)
FOREIGN_ENGINES = ("vllm", "sglang", "lmcache", "transformers")
DRIVERS = ("kvstore.bench.vllm_engine",)
"""Scripts that run an engine as its users do, in the engine's environment; nobody imports them."""


def part_of(module: str) -> tuple[str, ...] | None:
    """Return what a module may import, or None where no row names it."""
    if module == "kvstore":
        return ()
    return next((allowed for members, allowed in MAY_IMPORT if within(module, members)), None)


def wrong_direction(source: Source, ours: frozenset[str]) -> Iterator[str]:
    """Yield the imports of our own modules that this module may not make."""
    allowed = part_of(source.module)
    if allowed is None:
        yield f"{source.path}: belongs to no part; give it a row in MAY_IMPORT"
        return
    for item in imports(source):
        if item.target.split(".")[0] not in ("kvstore", "engine_adapters"):
            continue
        # `from kvstore import __version__` names the package itself, which imports nothing.
        target = item.target if item.target in ours else item.target.rpartition(".")[0]
        if target != "kvstore" and not within(item.target, allowed):
            yield f"{source.path}:{item.line}: imports {item.target}"


def outside_base(source: Source, standard: Iterable[str]) -> Iterator[str]:
    """Yield what a module of the base install imports that the base install does not have."""
    for item in imports(source):
        root = item.target.split(".")[0]
        if root not in standard and root != "kvstore" and not within(item.target, BASE_PACKAGES):
            yield f"{source.path}:{item.line}: imports {item.target}"


def out_of_place(source: Source) -> Iterator[str]:
    """Yield imports of confined packages outside their place."""
    for packages, places in CONFINED:
        if within(source.module, places):
            continue
        for item in imports(source):
            if within(item.target, packages):
                yield f"{source.path}:{item.line}: imports {item.target}; its place is {', '.join(places)}"


def importers_of(engine: str, sources: Iterable[Source]) -> list[str]:
    """Return the files that import a foreign engine."""
    return [s.path for s in sources if any(within(item.target, (engine,)) for item in imports(s))]


def test_imports_point_one_way() -> None:
    sources = product_sources()
    ours = frozenset(source.module for source in sources)
    found = [line for source in sources for line in wrong_direction(source, ours)]
    assert not found, report(
        "imports point one way (foundation < rpc < client < tiers < core < service < cli):", found
    )


def test_the_client_needs_the_base_install_only() -> None:
    base = (source for source in product_sources() if within(source.module, BASE))
    found = [line for source in base for line in outside_base(source, sys.stdlib_module_names)]
    assert not found, report(f"foundation, rpc and client live on {', '.join(BASE_PACKAGES)}:", found)


def test_packages_stay_in_their_place() -> None:
    sources = [source for source in product_sources() if not within(source.module, DRIVERS)]
    found = [line for source in sources for line in out_of_place(source)]
    assert not found, report("a package is imported outside its place:", found)


@pytest.mark.parametrize("engine", FOREIGN_ENGINES)
def test_a_foreign_engine_is_imported_in_one_file(engine: str) -> None:
    sources = [source for source in product_sources() if not within(source.module, DRIVERS)]
    found = importers_of(engine, sources)
    assert len(found) <= 1, report(f"{engine} is imported in more than one file:", found)
    assert all(path.startswith("engine_adapters/") for path in found), report(
        f"{engine} is imported by", found
    )


def test_nobody_imports_a_driver() -> None:
    found = [
        f"{source.path}:{item.line}: imports {item.target}"
        for source in product_sources()
        for item in imports(source)
        if within(item.target, DRIVERS)
    ]
    assert not found, report("a driver runs in its engine's environment only:", found)


OURS = frozenset(
    {
        "kvstore",
        "kvstore.core",
        "kvstore.core.index",
        "kvstore.tiers.base",
        "kvstore.tiers.ssd",
        "kvstore.types",
    }
)


@pytest.mark.parametrize(
    ("path", "text", "is_wrong"),
    [
        ("kvstore/types.py", "from kvstore.core.index import Index", True),
        ("kvstore/types.py", "def f():\n    from kvstore import core", True),
        ("kvstore/core/store.py", "from kvstore.tiers.ssd import SsdTier", True),
        ("kvstore/core/store.py", "from ..tiers import ssd", True),
        ("kvstore/core/store.py", "from kvstore.tiers.base import Tier\nfrom . import index", False),
        ("kvstore/cli/status.py", "import engine_adapters", True),
        ("kvstore/cli/demo_text.py", "from engine_adapters.transformers import cache", False),
        ("kvstore/client/a.py", "from kvstore import __version__", False),
        ("kvstore/surprise/a.py", "", True),
    ],
)
def test_the_direction_rule_bites(path: str, text: str, is_wrong: bool) -> None:
    assert bool(list(wrong_direction(parse(path, text), OURS))) == is_wrong


@pytest.mark.parametrize(
    ("path", "text", "is_wrong"),
    [
        ("kvstore/core/store.py", "import torch", True),
        ("kvstore/client/session.py", "from grpc import aio", True),
        ("kvstore/service/servicer.py", "from grpc import aio\nimport asyncio", False),
        ("kvstore/cli/demo.py", "import torch", False),
        ("kvstore/cli/serve.py", "import torch", True),
    ],
)
def test_the_place_rule_bites(path: str, text: str, is_wrong: bool) -> None:
    assert bool(list(out_of_place(parse(path, text)))) == is_wrong


def test_the_base_rule_bites() -> None:
    source = parse(
        "kvstore/client/a.py", "import json\nimport grpc\nimport rich\nfrom google.protobuf import message"
    )
    assert list(outside_base(source, sys.stdlib_module_names)) == ["kvstore/client/a.py:3: imports rich"]


def test_a_second_importer_is_found() -> None:
    sources = [parse(f"engine_adapters/vllm/{name}.py", "from vllm import LLM") for name in "ab"]
    assert importers_of("vllm", sources) == ["engine_adapters/vllm/a.py", "engine_adapters/vllm/b.py"]
