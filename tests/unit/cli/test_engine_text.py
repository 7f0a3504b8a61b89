"""Chat templates: whether the history that they write holds an earlier answer as it was generated."""

from __future__ import annotations

import jinja2
import pytest
from tokenizers import Tokenizer, models

from kvstore.cli.engine_text import GgufCodec

KEEPS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
DROPS = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"


@pytest.mark.parametrize(("template", "drops"), [(KEEPS, False), (DROPS, True), (None, False)])
def test_a_template_that_drops_thinking_is_found_out(template: str | None, drops: bool) -> None:
    compiled = jinja2.Template(template) if template else None
    assert GgufCodec(Tokenizer(models.BPE()), compiled, frozenset()).drops_thinking is drops
