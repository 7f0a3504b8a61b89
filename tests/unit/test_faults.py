"""The table of faults: every kind has its line, and every test that a line names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.tidy.tree import ROOT

PAGE = ROOT / "docs" / "faults.md"
KINDS = ("K1", "K2", "K4", "K5", "K6", "K7", "K8", "K9", "K11")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LEAST = 4


def lines() -> dict[str, str]:
    """Return the lines of the table by their kind."""
    found = re.findall(r"^\| (K\d+) \|(.*)\|$", PAGE.read_text(), re.M)
    assert len(dict(found)) == len(found)
    return dict(found)


def names_in(path: str) -> Iterator[str]:
    """Yield what a test file defines: functions, classes and the test cases it assigns."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_every_kind_has_one_line() -> None:
    assert tuple(lines()) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_tests_that_a_line_names_exist(kind: str) -> None:
    elsewhere, here, shown_by = lines()[kind].split(" | ")
    assert elsewhere.strip() and here.strip()
    named = NAMED.findall(shown_by)
    assert len(named) >= LEAST
    missing = [f"{path}::{name}" for path, name in named if name not in set(names_in(path))]
    assert not missing
