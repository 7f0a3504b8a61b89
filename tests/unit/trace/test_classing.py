"""Rules that give requests their retention class."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import InvalidArgument
from kvstore.trace.classing import parse_rules


@pytest.mark.parametrize(
    ("rule", "holds"),
    [
        ("x: type=text", True),
        ("x: type!=text", False),
        ("x: type=te*", True),
        ("x: input_length>4000", True),
        ("x: input_length>=4001,turn<3", False),
        ("x: input_length<=4001, turn=3", True),
        ("x: agent=null", True),
        ("x: missing>0", False),
        ("x: type>0", False),
        ("x: streams=true", True),
        ("x:", True),
    ],
)
def test_conditions(rule: str, holds: bool) -> None:
    fields = {"type": "text", "input_length": 4001, "turn": 3, "agent": None, "streams": True}
    assert parse_rules([rule]).class_of(fields) == ("x" if holds else "")


def test_the_first_rule_that_holds_decides(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('[[rule]]\nclass = "batch"\nwhen = "input_length>100"\n[[rule]]\nclass = "chat"\n')
    rules = parse_rules(["system: turn=0", str(path)])
    assert rules.classes == ("system", "batch", "chat")
    assert [rules.class_of({"turn": t, "input_length": n}) for t, n in ((0, 999), (1, 999), (1, 9))] == [
        "system",
        "batch",
        "chat",
    ]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("chat", "expected CLASS"),
        (": type=text", "names no class"),
        ("chat: type", "no FIELD=VALUE"),
        ("chat: turn>many", "no number"),
        ("none.toml", "No such file"),
    ],
)
def test_misuse_names_the_rule(rule: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as raised:
        parse_rules([rule])
    assert rule.strip() in str(raised.value)


@pytest.mark.parametrize("content", ["rule = 1", "[[rule]]\nclass = 3", "[[rule]]\nclass='a'\nif='b'", "="])
def test_a_bad_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.toml").write_text(content)
    with pytest.raises(InvalidArgument, match=r"r\.toml"):
        parse_rules([str(tmp_path / "r.toml")])
