"""What an examination finds: a level, what was seen, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How a finding counts: only a problem makes a command fail."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result: what was found and, unless all is well, what to do."""

    check: str
    level: Level
    found: str
    advice: str = ""
