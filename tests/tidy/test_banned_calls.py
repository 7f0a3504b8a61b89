"""The core decides and does nothing else: time, files and randomness are handed to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.tidy.tree import Source, imports, parse, product_sources, report, within

CORE = ("kvstore.core",)
# Whole modules: whoever imports one of these can reach a clock, a file, a socket or a die.
CORE_MAY_NOT_IMPORT = (
    "fcntl", "io", "mmap", "numpy.random", "os", "random", "secrets",
    "select", "shutil", "socket", "subprocess", "tempfile", "time", "uuid",
)  # fmt: skip
CORE_MAY_NOT_CALL = ("open", "print", "datetime.now", "datetime.datetime.now", "np.random", "numpy.random")
# Everybody else asks kvstore.clock, so that a virtual clock can drive it; a command line is asked about now.
READS_WALL_TIME = ("kvstore.clock", "kvstore.cli")
WALL_TIME = ("time.time", "time.time_ns")


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` for a chain of names, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def calls(source: Source, names: tuple[str, ...]) -> Iterator[str]:
    """Yield every call of one of the names, or of something below it."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and within(dotted(node.func), names):
            yield f"{source.path}:{node.lineno}: calls {dotted(node.func)}"


def impure(source: Source) -> Iterator[str]:
    """Yield what a file of the core does that it must be handed instead."""
    for item in imports(source):
        if within(item.target, CORE_MAY_NOT_IMPORT):
            yield f"{source.path}:{item.line}: imports {item.target}"
    yield from calls(source, CORE_MAY_NOT_CALL)


def test_the_core_is_handed_what_it_needs() -> None:
    found = [line for source in product_sources() if within(source.module, CORE) for line in impure(source)]
    assert not found, report("the core reaches for time, files, sockets or randomness:", found)


def test_wall_time_has_one_source() -> None:
    others = (source for source in product_sources() if not within(source.module, READS_WALL_TIME))
    found = [line for source in others for line in calls(source, WALL_TIME)]
    assert not found, report("take a kvstore.clock.Clock instead of reading wall time:", found)


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "from time import monotonic",
        "def f():\n    from os import open",
        "import os.path",
        "open('x')",
        "import numpy as np\nnp.random.default_rng()",
    ],
)
def test_the_rule_bites(text: str) -> None:
    assert list(impure(parse("kvstore/core/a.py", text)))


def test_the_rule_lets_the_rest_pass() -> None:
    text = "import threading\nimport timeit_like\nclock.time()\nself.files.open('x')\nhole.open()"
    assert list(impure(parse("kvstore/core/a.py", text))) == []
