"""What many end-to-end tests begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.served import Home


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home()
    yield made
    made.remove()
