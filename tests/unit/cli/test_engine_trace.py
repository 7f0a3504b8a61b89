"""A slice of a trace through prefill and decode: hits as simulated, answers as without a store, a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.cli.engine_trace import prompt_of
from kvstore.cli.main import app
from kvstore.trace.blocks import TraceRequest
from tests.support.engine_models import write_gguf
from tests.support.tiny_model import tiny_model

SESSIONS = [[1, 2, 3], [11, 12], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [11, 12, 13], list(range(100, 140))]


def test_equal_ids_are_equal_tokens_and_others_are_not() -> None:
    one = TraceRequest(timestamp_ms=0, input_tokens=24, output_tokens=1, runs=((5, 3),))
    other = TraceRequest(timestamp_ms=0, input_tokens=24, output_tokens=1, runs=((5, 2), (9, 1)))
    prompts = [
        prompt_of(request, block_tokens=8, vocabulary=500, tail=16, number=number)
        for number, request in enumerate((one, other))
    ]
    assert [len(prompt) for prompt in prompts] == [40, 40]
    assert prompts[0][:16] == prompts[1][:16]
    assert prompts[0][16:24] != prompts[1][16:24]
    assert prompts[0][24:] != prompts[1][24:]


@pytest.mark.slow
def test_every_hit_is_the_simulated_one(tmp_path: Path) -> None:
    write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    lines = [
        {"timestamp": 1000 * n, "input_length": 64 * len(ids), "hash_ids": ids, "block_size": 64}
        for n, ids in enumerate(SESSIONS)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    picture = tmp_path / "ttft.svg"
    command = f"engine trace {tmp_path}/trace.jsonl --model {tmp_path}/tiny.gguf --blocks-max 10"
    result = CliRunner().invoke(app, f"{command} --plot {picture} --json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["requests"] == 5, "the longest one is left out"
    assert [row["simulated_hit"] for row in document["rows"]] == [0, 0, 48, 80, 32]
    assert [sum(row["hits"].values()) for row in document["rows"]] == [0, 0, 48, 80, 32]
    assert document["token_hit_rate"] == document["simulated_token_hit_rate"] > 0
    assert document["rows"][3]["hits"] == {"host": 80}, "the other prefill worker computed it"
    assert all(row["is_same_answer"] for row in document["rows"])
    assert picture.read_text().startswith("<?xml")
