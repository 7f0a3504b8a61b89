"""`status` shows tiers, hit rates by tier and queues, and says whether all is well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.main import run
from kvstore.cli.status import is_healthy, labelled
from tests.unit.cli.fake_daemon import Answers, fake_daemon

DOCUMENT: dict[str, Any] = {
    "version": "0.1.0",
    "pid": 4711,
    "uptime_seconds": 3725.0,
    "tiers": [
        {
            "tier": "host",
            "state": "ok",
            "capacity_bytes": 1 << 30,
            "used_bytes": 1 << 29,
            "free_bytes": 1 << 29,
            "blocks": 4096,
            "detail": "4 KiB pages [tmpfs]",
        },
        {
            "tier": "ssd",
            "state": "ok",
            "capacity_bytes": 1 << 40,
            "used_bytes": 0,
            "blocks": 0,
            "detail": "",
            "scrub": "pass 2, next segment 000000000000001f, 0 bad",
            "today": "2026-11-29",
            "written": [
                {"day": "2026-10-20", "class": "chat", "bytes": 5 << 30},
                {"day": "2026-11-20", "class": "agent", "bytes": 3 << 30},
                {"day": "2026-11-29", "class": "agent", "bytes": 1 << 20},
            ],
        },
    ],
    "recovery": {"frames": 2, "text": "7 blocks in 2 runs"},
    "classes": [
        {
            "class": "agent",
            "ttl_seconds": 259200.0,
            "mode": "sliding",
            "lowest_tier": "ssd",
            "blocks": 4096,
            "host_bytes": 1 << 29,
            "ssd_bytes": 0,
        }
    ],
    "namespaces": [],
    "counters": {
        "kvstore_lookup_tokens_total": 1000.0,
        "kvstore_hit_tokens_total{class=agent,tier=host}": 600.0,
        "kvstore_hit_tokens_total{class=chat,tier=host}": 50.0,
        "kvstore_hit_tokens_total{class=agent,tier=ssd}": 100.0,
        "kvstore_misses_total{reason=expired}": 3.0,
        "kvstore_misses_total{reason=evicted}": 0.0,
    },
    "gauges": {"kvstore_leases": 2.0, "kvstore_write_queue_bytes": 2048.0, "kvstore_host_used_bytes": 5.0},
}


def test_people_get_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_daemon(tmp_path, Answers(document=DOCUMENT)) as address:
        assert run(["status", "--address", address]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert "kvstore 0.1.0 · pid 4711 · up 1 h 2 min · healthy" in shown
    assert ["host", "650", "65.0", "%"] in lines
    assert ["ssd", "100", "10.0", "%"] in lines
    assert ["all", "750", "75.0", "%"] in lines
    assert ["expired", "3"] in lines
    assert ["write", "queue", "2.0", "KiB"] in lines
    assert ["leases", "2"] in lines
    assert ["agent", "1.0", "MiB", "1.0", "MiB", "3.0", "GiB"] in lines
    assert not any(line[:1] == ["chat"] for line in lines), "nothing was written for it in 30 days"
    assert "evicted" not in shown
    assert "scrub: pass 2, next segment 000000000000001f, 0 bad" in shown
    assert "recovered: 7 blocks in 2 runs" in shown
    assert "4 KiB pages [tmpfs]" in shown


def test_programs_get_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_daemon(tmp_path, Answers(document=DOCUMENT)) as address:
        assert run(["status", "--json", "--address", address]) == 0
    assert json.loads(capsys.readouterr().out) == DOCUMENT


def test_a_tier_that_is_down_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = [DOCUMENT["tiers"][0], {"tier": "ssd", "state": "down", "detail": "input/output error"}]
    with fake_daemon(tmp_path, Answers(document=DOCUMENT | {"tiers": tiers})) as address:
        assert run(["status", "--address", address]) == 1
    shown = capsys.readouterr().out
    assert "not healthy" in shown
    assert "input/output error" in shown


def test_a_fresh_daemon_has_no_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_daemon(tmp_path, Answers(document=DOCUMENT | {"counters": {}})) as address:
        assert run(["status", "--address", address]) == 0
    assert "Hit rate" not in capsys.readouterr().out


def test_the_address_comes_from_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_daemon(tmp_path, Answers(document=DOCUMENT)) as address:
        monkeypatch.setenv("KVSTORE_ADDRESS", address)
        assert run(["status"]) == 0
    assert "4711" in capsys.readouterr().out


def test_counters_sum_by_label() -> None:
    counters = {'a{tier="host",class="x"}': 1.0, "a{tier=host}": 2.0, "a{tier=ssd}": 4.0, "ab{tier=ssd}": 8.0}
    assert labelled(counters, "a", "tier") == {"host": 3.0, "ssd": 4.0}
    assert labelled(counters, "a", "absent") == {"": 7.0}


def test_a_tier_that_is_switched_off_is_no_problem() -> None:
    assert is_healthy({"tiers": [{"state": "ok"}, {"state": "disabled"}]})
    assert not is_healthy({"tiers": [{"state": "read_only"}]})
