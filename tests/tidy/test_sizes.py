"""No file and no function grows a tail."""

from __future__ import annotations

import ast

from tests.tidy.tree import Source, parse, product_sources, report

FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 60


def long_files(sources: tuple[Source, ...]) -> list[str]:
    """Return the files that are too long, with their length."""
    lengths = ((source.path, len(source.text.splitlines())) for source in sources)
    return [f"{path}: {length} lines" for path, length in lengths if length > FILE_LINES_MAX]


def long_functions(sources: tuple[Source, ...]) -> list[str]:
    """Return the functions that are too long, decorators aside, with their length."""
    found = []
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    found.append(f"{source.path}:{node.lineno} {node.name}: {length} lines")
    return found


def test_files_are_short() -> None:
    found = long_files(product_sources())
    assert not found, report(f"a file has at most {FILE_LINES_MAX} lines; look for a second noun in", found)


def test_functions_are_short() -> None:
    found = long_functions(product_sources())
    assert not found, report(f"a function has at most {FUNCTION_LINES_MAX} lines; split", found)


def test_the_rules_bite() -> None:
    body = "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX
    assert long_functions((parse("kvstore/a.py", body),)) == ["kvstore/a.py:1 f: 61 lines"]
    assert long_functions((parse("kvstore/a.py", body.replace("    x = 1\n", "", 1)),)) == []
    assert long_files((parse("kvstore/a.py", "x = 1\n" * 451),)) == ["kvstore/a.py: 451 lines"]
    assert long_files((parse("kvstore/a.py", "x = 1\n" * 450),)) == []
