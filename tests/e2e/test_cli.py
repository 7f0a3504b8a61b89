"""The commands on a real daemon: what they print, what they return, and the README's own example."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvstore.bench.groups import DEFAULT, GROUPS
from kvstore.cli.child import ChildDaemon
from kvstore.cli.main import run
from kvstore.client import Client
from kvstore.hashing import block_hashes, chain_root
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.types import AckTier
from tests.tidy.tree import ROOT

BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 12, 4, 8192
TOKENS = list(range(BLOCKS * BLOCK_TOKENS))
NAMESPACE = Namespace(
    model="tiny",
    weights="w1",
    layout=Layout.single(dtype="u8", bytes_max=BLOCK_BYTES, layers=4, segments=2),
    block_tokens=BLOCK_TOKENS,
)
PAYLOAD = np.random.default_rng(1).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)
KEYS = block_hashes(chain_root(NAMESPACE.fingerprint), TOKENS, block_tokens=BLOCK_TOKENS)
SMALL = {"ssd.segment_bytes": "16MiB", "ssd.capacity_bytes": "256MiB"}


def kvstore(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command without a terminal, in this process: a program's start takes longer than its work."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")}
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, inherited | environment, clear=True),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run(list(arguments))
    assert "Traceback" not in err.getvalue()
    assert "\x1b" not in out.getvalue() + err.getvalue()
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the JSON that a command printed."""
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def store(address: str) -> None:
    """Put the payload on SSD and read it once."""
    with Client(address) as client:
        namespace = client.open(NAMESPACE)
        put = namespace.put(namespace.root, KEYS, PAYLOAD, ack=AckTier.SSD, retention_class="chat")
        assert put.stored == BLOCKS
        into = np.zeros_like(PAYLOAD)
        assert namespace.get(KEYS, into).blocks == BLOCKS
        assert np.array_equal(into, PAYLOAD)
        client.ping(10.0)  # what was sent one-way before it, the release, has arrived


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildDaemon]:
    """A daemon that holds the payload."""
    with ChildDaemon(tmp_path_factory.mktemp("d"), arena_bytes=64 << 20, settings=SMALL) as child:
        store(child.address)
        yield child


@pytest.fixture
def stopped(tmp_path: Path) -> ChildDaemon:
    """A daemon that held the payload and has ended."""
    with ChildDaemon(tmp_path, arena_bytes=64 << 20, settings=SMALL) as child:
        store(child.address)
    return child


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    """A file with the prompt's tokens, and one block nobody stored."""
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps([*TOKENS, 7, 7, 7, 7]))
    return path


def test_the_program_does_as_the_function(daemon: ChildDaemon) -> None:
    command = [sys.executable, "-m", "kvstore.cli.main", "inspect", "segments", "-a"]
    done = subprocess.run([*command, daemon.address], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == kvstore("inspect", "segments", "-a", daemon.address).stdout
    wrong = subprocess.run(
        [*command, "unix:/nonexistent/s"], capture_output=True, text=True, check=False, timeout=100
    )
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == kvstore("inspect", "segments", "-a", "unix:/nonexistent/s").stderr


def test_status(daemon: ChildDaemon) -> None:
    done = kvstore("status", "--address", daemon.address)
    assert done.returncode == 0, done.stderr
    assert f"pid {daemon.pid}" in done.stdout
    assert "healthy" in done.stdout
    status = document(kvstore("status", "--json", KVSTORE_ADDRESS=daemon.address))
    assert {tier["tier"] for tier in status["tiers"]} == {"host", "ssd"}
    classes = {row["class"]: row for row in status["classes"]}
    assert classes["chat"]["blocks"] == BLOCKS
    assert status["counters"]["kvstore_lookup_tokens_total"] >= len(TOKENS)
    assert re.search(rf"^ host +{len(TOKENS)} ", done.stdout, re.M), done.stdout


def test_inspect_namespaces(daemon: ChildDaemon) -> None:
    rows = document(kvstore("inspect", "namespaces", "--json", "-a", daemon.address))["namespaces"]
    (row,) = [row for row in rows if row["identity"]["model"] == "tiny"]
    assert row["fingerprint"] == NAMESPACE.fingerprint.hex()
    assert row["blocks"] == BLOCKS
    assert row["layout"] == json.loads(json.dumps(NAMESPACE.layout.to_plain()))


def test_inspect_the_blocks_of_a_prompt(daemon: ChildDaemon, prompt: Path) -> None:
    options = ["inspect", "blocks", "--tokens", str(prompt), "-n", "tiny", "-a", daemon.address]
    done = kvstore(*options)
    assert done.returncode == 0, done.stderr
    assert "a match finds 12 of 13 blocks, 48 of 52 tokens, then never_stored" in done.stdout
    found = document(kvstore(*options, "--json"))
    (run,) = found["runs"]
    assert (run["blocks"], run["host_blocks"], run["ssd_blocks"], run["class"]) == (12, 12, 12, "chat")
    assert run["expires_at"] == pytest.approx(run["touched_at"] + 7 * 86400)
    one = document(
        kvstore(
            "inspect", "blocks", "--hash", run["keys"][3][:12], "-n", "tiny", "-a", daemon.address, "--json"
        )
    )
    assert run["keys"][3] in [key for found in one["runs"] for key in found["keys"]]


def test_inspect_segments(daemon: ChildDaemon) -> None:
    (segment,) = document(kvstore("inspect", "segments", "--json", "-a", daemon.address))["segments"]
    assert segment["frames"] >= 1
    assert Path(segment["path"]).exists()


def test_verify(daemon: ChildDaemon) -> None:
    done = kvstore("verify", "-a", daemon.address, "-n", "tiny")
    assert done.returncode == 0, done.stderr
    assert "all digests right" in done.stdout
    checked = document(kvstore("verify", "--json", "-a", daemon.address))
    assert checked["faults"] == []
    assert checked["blocks"] >= BLOCKS


def test_doctor_uses_the_daemon_and_leaves_nothing(daemon: ChildDaemon) -> None:
    done = kvstore("doctor", "--json", "-a", daemon.address, "--data", str(daemon.data))
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {f["check"]: f for f in document(done)["findings"] if f["section"] == "daemon"}
    assert {"daemon", "host tier", "ssd tier", "expiry", "deletion"} <= set(findings)
    assert all(f["level"] == "ok" for f in findings.values())
    rows = document(kvstore("inspect", "namespaces", "--json", "-a", daemon.address))["namespaces"]
    assert {row["identity"]["model"]: row["blocks"] for row in rows}.get("kvstore-doctor", 0) == 0


@pytest.mark.slow  # imports the engine
def test_doctor_examines_an_engine(daemon: ChildDaemon) -> None:
    done = kvstore("doctor", "--json", "--engine", "transformers", "-a", daemon.address)
    findings = {f["check"]: f for f in document(done)["findings"] if f["section"] == "engine transformers"}
    assert list(findings) == ["engine", "adapter", "namespace", "round trip", "hit counters"]
    assert all(f["level"] == "ok" for f in findings.values()), findings
    assert kvstore("doctor", "--engine", "nothing", "-a", daemon.address).returncode == 2


def test_doctor_tests_itself_a_daemon() -> None:
    done = kvstore("doctor", "--self-test", "--json", "-a", "unix:/nonexistent/s", "--data", "/tmp")
    findings = {f["check"]: f for f in document(done)["findings"] if f["section"] == "temporary daemon"}
    assert {"start", "restart", "read from ssd", "expiry"} <= set(findings)
    assert all(f["level"] == "ok" for f in findings.values()), findings


def test_offline_refuses_a_live_store(daemon: ChildDaemon) -> None:
    done = kvstore("inspect", "segments", "--offline", str(daemon.data))
    assert done.returncode == 1
    assert f"used by the daemon with pid {daemon.pid}" in done.stderr


def test_offline_refuses_what_is_no_store(tmp_path: Path) -> None:
    done = kvstore("inspect", "segments", "--offline", str(tmp_path))
    assert done.returncode == 2
    assert "no data directory" in done.stderr


def test_a_stopped_store_can_be_read(stopped: ChildDaemon, prompt: Path) -> None:
    offline = ["--offline", str(stopped.data), "--json"]
    (row,) = document(kvstore("inspect", "namespaces", *offline))["namespaces"]
    assert (row["identity"]["model"], row["blocks"]) == ("tiny", BLOCKS)
    (segment,) = document(kvstore("inspect", "segments", *offline))["segments"]
    assert segment["sealed"] is True
    found = document(kvstore("inspect", "blocks", "--tokens", str(prompt), *offline))
    assert (found["visible_blocks"], found["asked_blocks"], found["reason"]) == (12, 13, "not on SSD")
    assert sum(run["ssd_blocks"] for run in found["runs"]) == BLOCKS
    done = kvstore("verify", *offline)
    assert done.returncode == 0
    assert document(done) == {
        "blocks": BLOCKS,
        "bytes": document(done)["bytes"],
        "unreadable": 0,
        "faults": [],
    }


def test_a_changed_byte_is_found(stopped: ChildDaemon) -> None:
    (segment,) = (stopped.data / "segments").glob("*.seg")
    content = bytearray(segment.read_bytes())
    at = content.index(PAYLOAD[5].tobytes()[:64])
    content[at] ^= 1
    segment.write_bytes(content)
    done = kvstore("verify", "--offline", str(stopped.data), "--json")
    assert done.returncode == 1
    (fault,) = document(done)["faults"]
    changed = KEYS[5 * 32 : 6 * 32].hex()
    assert (fault["key"], fault["tier"]) == (changed, "ssd")
    assert "digest" in fault["detail"]


def readme_examples() -> list[str]:
    """Return the README's Python blocks."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def test_the_readme_example_works(daemon: ChildDaemon) -> None:
    example = readme_examples()[0]
    environment = os.environ | {"KVSTORE_ADDRESS": daemon.address}
    done = subprocess.run(
        [sys.executable, "-c", example],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["6 blocks stored", "6 blocks back, reason: None"]


def test_the_readme_example_of_the_adapter_works(
    daemon: ChildDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from tests.support.tiny_model import tiny_model, tokens

    monkeypatch.setenv("KVSTORE_ADDRESS", daemon.address)
    model, prompt_ids = tiny_model(seed=11), tokens(200, seed=3)
    for _ in range(2):
        exec(readme_examples()[1], {"model": model, "prompt_ids": prompt_ids})
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "0 of 200 prompt tokens came from the store"
    assert re.fullmatch(r"1\d\d of 200 prompt tokens came from the store", shown[1])


def test_bench_writes_what_it_shows(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = kvstore(
        "bench", "match", "--quick", "--rounds", "1", "--json", str(result), "--directory", str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(result.read_text())
    assert [row["name"] for row in written["rows"]] == ["match_600", "match_7800"]
    assert all(row["value"] > 0 for row in written["rows"])
    assert set(written["rows"][0]) == {"name", "value", "better", "bar", "baseline", "unit", "detail"}
    assert written["machine"]["cpus"] >= 1
    assert all(row["name"] in done.stdout for row in written["rows"])


def test_over_tcp_with_a_token(tmp_path: Path) -> None:
    token = "a-token-of-some-length"
    tcp = {"server.tcp_address": "127.0.0.1:0", "server.token": token, "server.plaintext_loopback": "true"}
    with ChildDaemon(tmp_path, arena_bytes=64 << 20, settings=SMALL | tcp) as child:
        address = document(kvstore("status", "--json", "-a", child.address))["tcp_address"]
        assert kvstore("status", "-a", address, "--token", token).returncode == 0
        refused = kvstore("status", "-a", address, "--token", "another-token-of-some-length")
        assert refused.returncode == 1
        assert refused.stderr.startswith("kvstore: ")
        done = kvstore("doctor", "--json", "-a", address, KVSTORE_TOKEN=token)
        assert done.returncode == 0, done.stdout
        findings = {f["check"]: f for f in document(done)["findings"] if f["section"] == "daemon"}
        assert findings["host tier"]["level"] == "ok"


@pytest.mark.slow
def test_every_group_of_the_bench_runs(tmp_path: Path) -> None:
    done = kvstore("bench", "--quick", "--rounds", "1", "--json", "-", "--directory", str(tmp_path))
    rows = {row["name"]: row for row in document(done)["rows"]}
    assert set(rows) == {spec.name for name in DEFAULT for spec in GROUPS[name].rows}
    unmeasured = {name for name, row in rows.items() if row["value"] is None}
    assert unmeasured <= {"ssd_read"}, {name: rows[name]["detail"] for name in unmeasured}


@pytest.mark.slow
def test_a_hung_daemon_is_not_a_missing_one(tmp_path: Path) -> None:
    with ChildDaemon(tmp_path, arena_bytes=64 << 20, settings=SMALL) as child:
        os.kill(child.pid, signal.SIGSTOP)
        try:
            done = kvstore("status", "-a", child.address)
            judged = kvstore("doctor", "--json", "-a", child.address, "--data", str(tmp_path))
        finally:
            os.kill(child.pid, signal.SIGCONT)
    assert done.returncode == judged.returncode == 1
    assert "did not answer within 10 s" in done.stderr
    (finding,) = [f for f in document(judged)["findings"] if f["section"] == "daemon"]
    assert finding["level"] == "problem"
