"""What the crash tests share."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.crash_fs import Crashed


@pytest.fixture(autouse=True)
def _quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that meets the crash ends with it, and need not say so."""

    def hook(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.exc_value, Crashed):
            threading.__excepthook__(args)

    monkeypatch.setattr(threading, "excepthook", hook)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Lend a directory for LMDB's files, in memory where possible: LMDB syncs a lot."""
    fast = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=fast if os.access(fast, os.W_OK) else None) as name:
        yield Path(name)


FIGURES: list[str] = []


@pytest.fixture
def figure() -> Callable[[str], None]:
    """Lend what takes a figure for the end of the run: how much was tried, and what came of it."""
    return FIGURES.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures."""
    for line in FIGURES:
        terminalreporter.write_line(line)


@pytest.fixture
def quiet_log() -> Iterator[None]:
    """Log nothing: kept records hold errors, those their tracebacks, and those every tier of a long run."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
