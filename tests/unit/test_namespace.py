"""Canonical forms from strangers: JSON has more types than a namespace has fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.errors import InvalidArgument
from kvstore.layout import Layout
from kvstore.namespace import CANONICAL_BYTES_MAX, Namespace

SPACE = Namespace(
    model="m",
    weights="w",
    layout=Layout.single(dtype="u8", bytes_max=4096, layers=2, segments=2),
    block_tokens=16,
)


def changed(path: tuple[str | int, ...], value: object) -> bytes:
    """Return the canonical form with one value replaced."""
    document: Any = json.loads(SPACE.canonical())
    node = document
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("identity", "model"), 5),
        (("identity", "model"), ["m"]),
        (("identity", "tenant"), None),
        (("identity", "rope"), {"a": 1}),
        (("identity", "weights"), "\ud800"),
        (("identity", "block_tokens"), 16.0),
        (("identity", "block_tokens"), True),
        (("identity", "block_tokens"), float("nan")),
        (("identity", "block_tokens"), 1 << 70),
        (("identity", "addressing"), "sideways"),
        (("identity", "another"), "x"),
        (("identity",), []),
        (("layout",), None),
        (("layout", "dtype"), 5),
        (("layout", "groups", 0, 0), 7),
        (("layout", "groups", 0, 2), -1),
        (("layout", "groups", 0, 2), float("inf")),
        (("layout", "parts", 0, 1), None),
        (("layout", "parts", 0, 2), 4096.0),
        (("layout", "parts", 0, 3, 0, 0), 1 << 40),
        (("layout", "parts", 0, 3, 0, 3), 2048.0),
        (("layout", "parts", 0, 3, 0), [0, 1]),
    ],
)
def test_a_value_of_another_kind_is_refused(path: tuple[str | int, ...], value: object) -> None:
    with pytest.raises(InvalidArgument):
        Namespace.from_canonical(changed(path, value))


def test_a_deep_or_long_form_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Namespace.from_canonical(b"[" * 200_000 + b"]" * 200_000)
    with pytest.raises(InvalidArgument, match=f"at most {CANONICAL_BYTES_MAX} bytes, got"):
        Namespace.from_canonical(changed(("identity", "model"), "m" * CANONICAL_BYTES_MAX))


def test_the_unchanged_form_is_taken() -> None:
    assert Namespace.from_canonical(SPACE.canonical()) == SPACE
