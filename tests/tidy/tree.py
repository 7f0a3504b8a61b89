"""Reads the source tree for the tidy tests: files, syntax trees, and the modules that each file imports."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvstore", "engine_adapters")
GENERATED = "kvstore/rpc/v1/"


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file: its path from the root, its dotted module name, its text and its syntax tree."""

    path: str
    module: str
    text: str
    tree: ast.Module


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module. `from a import b` counts as `a.b`: b may be a module, and prefixes decide."""

    target: str
    line: int


def parse(path: str, text: str) -> Source:
    """Return the source named by its path from the root."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return Source(path, module, text, ast.parse(text, filename=path))


@cache
def product_sources() -> tuple[Source, ...]:
    """Return every hand-written file of the packages, in path order."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    names = sorted(str(path.relative_to(ROOT)) for path in paths)
    return tuple(parse(name, (ROOT / name).read_text()) for name in names if not name.startswith(GENERATED))


@cache
def tracked_texts() -> dict[str, str]:
    """Return the text files that git tracks or would track, by path from the root."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    texts = {}
    for name in sorted(listed.decode().split("\0")):
        path = ROOT / name
        if not name or not path.is_file():
            continue
        content = path.read_bytes()
        if b"\0" not in content:
            texts[name] = content.decode(errors="replace")
    return texts


def imports(source: Source) -> Iterator[Import]:
    """Yield every import, also those inside functions and under TYPE_CHECKING: a type couples too."""
    package = source.module if source.path.endswith("/__init__.py") else source.module.rpartition(".")[0]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether a dotted name is a prefix or lies below one; `a.b*` takes all that starts so."""
    return any(
        name.startswith(prefix[:-1]) if prefix.endswith("*") else f"{name}.".startswith(f"{prefix}.")
        for prefix in prefixes
    )


def report(rule: str, offenders: list[str]) -> str:
    """Return the message of a failed rule, every offender on its own line."""
    return "\n  ".join([rule, *offenders])
