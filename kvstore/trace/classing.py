"""Which retention class a request of a trace belongs to: rules over the fields of its line."""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidArgument

_ORDERED: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(!=|>=|<=|=|>|<)\s*(.*?)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """A field against a value: `=` and `!=` take `*` and `?`, the others compare numbers."""

    field: str
    sign: str
    value: str

    def holds(self, fields: Mapping[str, Any]) -> bool:
        """Say whether it is so; a field that is not there is null."""
        found = fields.get(self.field)
        if self.sign in _ORDERED:
            is_number = isinstance(found, int | float) and not isinstance(found, bool)
            return is_number and _ORDERED[self.sign](float(found or 0), float(self.value))
        return fnmatchcase(_text(found), self.value) is (self.sign == "=")


@dataclass(frozen=True, slots=True)
class ClassRule:
    """A class, and the conditions that all must hold for it."""

    retention_class: str
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class ClassRules:
    """Rules in order: the first that holds decides, and without one it is the default class."""

    rules: tuple[ClassRule, ...] = ()

    def class_of(self, fields: Mapping[str, Any]) -> str:
        """Return the class of a request with these fields, empty for the default one."""
        for rule in self.rules:
            if all(condition.holds(fields) for condition in rule.conditions):
                return rule.retention_class
        return ""

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that rules name."""
        return tuple(dict.fromkeys(rule.retention_class for rule in self.rules))


def parse_rules(texts: Sequence[str]) -> ClassRules:
    """Return rules from `CLASS: FIELD=VALUE, FIELD>VALUE` texts, or from TOML files with `[[rule]]` tables
    of `class` and `when`.

    Errors: InvalidArgument, naming the rule.
    """
    rules: list[ClassRule] = []
    for text in texts:
        rules += _from_file(Path(text)) if text.endswith(".toml") else [_rule(text, *_split(text))]
    return ClassRules(tuple(rules))


def _split(text: str) -> tuple[str, str]:
    name, colon, when = text.partition(":")
    if not colon:
        raise InvalidArgument(f"class rule {text!r}: expected CLASS: FIELD=VALUE, or a .toml file")
    return name.strip(), when


def _rule(text: str, name: str, when: str) -> ClassRule:
    if not name:
        raise InvalidArgument(f"class rule {text!r}: names no class")
    parts = [part for part in when.split(",") if part.strip()]
    return ClassRule(name, tuple(_condition(text, part) for part in parts))


def _condition(text: str, part: str) -> Condition:
    found = _CONDITION.fullmatch(part)
    if found is None:
        raise InvalidArgument(f"class rule {text!r}: {part.strip()!r} is no FIELD=VALUE (= != > >= < <=)")
    condition = Condition(found[1], found[2], found[3])
    if condition.sign in _ORDERED:
        try:
            float(condition.value)
        except ValueError as error:
            raise InvalidArgument(f"class rule {text!r}: {condition.value!r} is no number") from error
    return condition


def _from_file(path: Path) -> list[ClassRule]:
    try:
        tables = tomllib.loads(path.read_text()).get("rule", [])
    except OSError as error:
        raise InvalidArgument(f"class rules {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidArgument(f"class rules {path}: no TOML: {error}") from error
    if not isinstance(tables, list) or not tables:
        raise InvalidArgument(f"class rules {path}: no [[rule]] in it")
    rules = []
    for number, table in enumerate(tables, 1):
        name, when = table.get("class"), table.get("when", "")
        if not isinstance(name, str) or not isinstance(when, str) or set(table) - {"class", "when"}:
            raise InvalidArgument(f"class rules {path}: rule {number} must have `class` and `when` texts")
        rules.append(_rule(f"{path}: {number}", name, when))
    return rules


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
