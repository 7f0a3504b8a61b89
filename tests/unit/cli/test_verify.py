"""`verify` follows the daemon's progress and fails when a block is not what was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.cli.main import run
from kvstore.rpc.v1 import admin_pb2, data_pb2
from tests.unit.cli.fake_daemon import Answers, fake_daemon
from tests.unit.cli.test_inspect import TINY, info

FAULT = admin_pb2.VerifyFault(
    namespace=TINY.fingerprint, key=b"\xab" * 32, tier=data_pb2.TIER_SSD, detail="payload [digest]"
)
FINE = [
    admin_pb2.VerifyReply(blocks_done=4, blocks_total=8, bytes_done=16384),
    admin_pb2.VerifyReply(blocks_done=8, blocks_total=8, bytes_done=32768, done=True),
]


def test_all_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_daemon(tmp_path, Answers(verify=FINE)) as address:
        assert run(["verify", "-a", address]) == 0
    assert "8 blocks, 32.0 KiB read: all digests right" in capsys.readouterr().out


def test_a_fault_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replies = [
        admin_pb2.VerifyReply(blocks_done=4, blocks_total=8, bytes_done=16384, faults=[FAULT]),
        FINE[1],
    ]
    with fake_daemon(tmp_path, Answers(verify=replies)) as address:
        assert run(["verify", "-a", address]) == 1
        shown = capsys.readouterr().out
        assert run(["verify", "-a", address, "--json"]) == 1
        document = json.loads(capsys.readouterr().out)
    assert "payload [digest]" in shown
    assert "1 faults" in shown
    assert document["blocks"] == 8
    assert document["faults"] == [
        {
            "namespace": TINY.fingerprint.hex(),
            "key": "ab" * 32,
            "tier": "ssd",
            "detail": "payload [digest]",
        }
    ]


def test_one_namespace(tmp_path: Path) -> None:
    answers = Answers(verify=FINE, namespaces=[info(TINY)])
    with fake_daemon(tmp_path, answers) as address:
        assert run(["verify", "-a", address, "-n", "tiny"]) == 0
    assert answers.asked[0].namespace == TINY.fingerprint
