"""Nothing unfinished and nothing of one machine is committed."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from tests.tidy.tree import report, tracked_texts

# Put together from pieces, so that this file passes its own rules.
LEFTOVER = re.compile(r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")
MACHINE_PATH = re.compile(
    "|".join(f"(?<![\\w.~]){path}" for path in ["/wo" + "rk/", "/ro" + "ot/"]) + "|index" + "-url"
)


def lines_with(pattern: re.Pattern[str], texts: Mapping[str, str]) -> list[str]:
    """Return every line that holds the pattern, as path:line: text."""
    return [
        f"{path}:{number}: {line.strip()[:120]}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_nothing_is_left_over() -> None:
    found = lines_with(LEFTOVER, tracked_texts())
    assert not found, report("finish it, or file it, but do not leave a note in the text:", found)


def test_no_path_of_a_machine() -> None:
    found = lines_with(MACHINE_PATH, tracked_texts())
    assert not found, report("a path or package index of one machine is committed:", found)


@pytest.mark.parametrize(
    ("pattern", "line", "is_found"),
    [
        (LEFTOVER, "# TO" + "DO later", True),
        (LEFTOVER, "mkstemp('kvstore.XX" + "XXXX')", False),
        (MACHINE_PATH, "open('/wo" + "rk/a')", True),
        (MACHINE_PATH, "pip --extra-index" + "-url x", True),
        (MACHINE_PATH, "framework/a", False),
    ],
)
def test_the_rules_bite(pattern: re.Pattern[str], line: str, is_found: bool) -> None:
    assert bool(lines_with(pattern, {"a": line})) == is_found
