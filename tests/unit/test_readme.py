"""The README says what is: its tables follow the code, and every command it names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from kvstore.cli.main import COMMANDS
from kvstore.cli.output import bytes_text, duration_text
from kvstore.metrics import METRICS
from kvstore.paths import SOCKET_NAME
from kvstore.retention import SHIPPED_CLASSES
from kvstore.settings import ClassSettings, Settings
from tests.tidy.tree import ROOT

README = ROOT / "README.md"
COMPUTED = {
    "server.address": f"`unix:` and `kvstore/{SOCKET_NAME}` in `$XDG_RUNTIME_DIR`, else in `/tmp`",
    "ssd.path": "`/var/lib/kvstore` for root, else `~/.local/state/kvstore`",
}


def settings_rows() -> Iterator[str]:
    """Yield the rows of the configuration table."""
    for section, info in Settings.model_fields.items():
        model = ClassSettings if section == "classes" else info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        middle = "<name>." if section == "classes" else ""
        for name, field in model.model_fields.items():
            key = f"{section}.{middle}{name}"
            yield f"| `{key}` | {shown(key, field.default)} | {field.description} |"


def shown(key: str, value: object) -> str:
    """Return a default as the table writes it."""
    if key in COMPUTED:
        return COMPUTED[key]
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is None or value in ("", PydanticUndefined):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if key.endswith("mode") and isinstance(value, int):
        return f"{value:04o}"
    if isinstance(value, int) and "bytes" in key and value:
        return bytes_text(value).replace(".0 ", " ")
    if isinstance(value, float):
        return duration_text(value)
    return str(value)


def metric_rows() -> Iterator[str]:
    """Yield the rows of the metrics table."""
    for metric in METRICS:
        yield f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |"


@pytest.mark.parametrize("rows", [settings_rows, metric_rows])
def test_tables_follow_the_code(rows: object) -> None:
    assert callable(rows)
    lines = README.read_text().splitlines()
    missing = [row for row in rows() if row not in lines]
    assert not missing, "\n".join(["README.md lacks these rows:", *missing])


def test_tables_name_nothing_that_is_gone() -> None:
    sections = r"kvstore_|server\.|host\.|ssd\.|encryption\.|classes\.|log\."
    named = set(re.findall(rf"^\| `((?:{sections})[^`]*)` \|", README.read_text(), re.M))
    known = {row.split("`")[1] for row in (*settings_rows(), *metric_rows())}
    assert named == known


def test_every_command_is_in_the_table() -> None:
    named = re.findall(r"^\| `kvstore ([\w-]+)` \|", README.read_text(), re.M)
    assert sorted(named) == sorted(COMMANDS)


def test_shipped_classes_are_as_told() -> None:
    text = " ".join(README.read_text().split())
    for item in SHIPPED_CLASSES:
        life = (
            "180 s"
            if item.name == "swa"
            else "60 s"
            if item.name == "handoff"
            else duration_text(item.ttl_seconds)
        )
        assert f"`{item.name}` {life} {item.mode}" in text


def test_linked_files_exist() -> None:
    named = re.findall(r"`([\w/]+\.md|engine_adapters/\w+)`", README.read_text())
    missing = [name for name in named if not Path(ROOT / name).exists()]
    assert not missing


def test_it_starts_with_how_to_run_it() -> None:
    lines = [line for line in README.read_text().splitlines() if line.startswith("make ")]
    assert lines[0].startswith("make demo")
    assert lines[1].startswith("make test")
