"""`inspect` finds the namespace that is meant, names a prompt's blocks, and shows where they lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.cli.inspect import choose_namespace, read_tokens
from kvstore.cli.main import run
from kvstore.cli.views import NamespaceView
from kvstore.errors import InvalidArgument
from kvstore.hashing import block_hashes, chain_root
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.rpc.v1 import admin_pb2, data_pb2
from tests.unit.cli.fake_daemon import Answers, fake_daemon

LAYOUT = Layout.single(dtype="u8", bytes_max=4096, layers=4)
TINY = Namespace(model="tiny", weights="w1", layout=LAYOUT, block_tokens=4)
OTHER = Namespace(model="other", weights="w2", layout=LAYOUT, block_tokens=4)


def info(namespace: Namespace) -> admin_pb2.NamespaceInfo:
    return admin_pb2.NamespaceInfo(
        fingerprint=namespace.fingerprint, canonical=namespace.canonical(), blocks=7, host_bytes=4096
    )


def run_of(keys: bytes) -> data_pb2.RunInfo:
    return data_pb2.RunInfo(
        parent=bytes(32),
        keys=keys,
        tiers=[data_pb2.TIER_HOST, data_pb2.TIER_SSD],
        host_blocks=2,
        ssd_blocks=1,
        retention_class="agent",
        written_at=1_700_000_000,
        touched_at=1_700_000_100,
        expires_at=float("inf"),
        bytes=8192,
        provenance=640,
        leased=True,
    )


def test_namespaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(namespaces=[info(TINY), info(OTHER)])
    with fake_daemon(tmp_path, answers) as address:
        assert run(["inspect", "namespaces", "-a", address]) == 0
        shown = capsys.readouterr().out
        assert run(["inspect", "namespaces", "-a", address, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
    assert TINY.fingerprint.hex()[:12] in shown
    assert [row["identity"]["model"] for row in document["namespaces"]] == ["tiny", "other"]
    assert document["namespaces"][0]["blocks"] == 7


def test_the_blocks_of_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tmp_path / "prompt.json"
    tokens.write_text(json.dumps(list(range(14))))
    keys = block_hashes(chain_root(TINY.fingerprint), list(range(14)), block_tokens=4)
    reply = admin_pb2.InspectReply(
        runs=[run_of(keys[:64])], visible_blocks=2, reason=data_pb2.MISS_REASON_EXPIRED
    )
    answers = Answers(namespaces=[info(TINY), info(OTHER)], inspect=reply)
    options = ["--tokens", str(tokens), "-n", "tiny"]
    with fake_daemon(tmp_path, answers) as address:
        assert run(["inspect", "blocks", *options, "-a", address]) == 0
        shown = capsys.readouterr().out
        assert run(["inspect", "blocks", *options, "-a", address, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
    assert answers.asked[0].keys == keys
    assert answers.asked[0].namespace == TINY.fingerprint
    assert "a match finds 2 of 3 blocks, 8 of 12 tokens, then expired" in shown
    assert "approx(640)" in shown
    assert "never" in shown
    assert document["visible_blocks"] == 2
    assert document["reason"] == "expired"
    assert document["runs"][0]["expires_at"] is None
    assert document["runs"][0]["tiers"] == ["host", "ssd"]


def test_a_tenant_has_other_names_for_the_same_prompt(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("1 2 3 4")
    (tmp_path / "secret").write_bytes(b"s3cret")
    answers = Answers(namespaces=[info(TINY)])
    with fake_daemon(tmp_path, answers) as address:
        options = ["--tokens", str(tmp_path / "prompt"), "--tenant-secret", str(tmp_path / "secret")]
        assert run(["inspect", "blocks", *options, "-a", address]) == 1
    root = chain_root(TINY.fingerprint, tenant_secret=b"s3cret")
    assert answers.asked[0].keys == block_hashes(root, [1, 2, 3, 4], block_tokens=4)


def test_a_hash_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(namespaces=[info(TINY)])
    with fake_daemon(tmp_path, answers) as address:
        assert run(["inspect", "blocks", "--hash", "0aFF", "-a", address]) == 1
    assert answers.asked[0].hash_prefix == b"\x0a\xff"
    assert "no such block" in capsys.readouterr().out


def test_segments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = admin_pb2.SegmentInfo(
        segment=255, path="/data/ff.seg", bucket="agent-1", bytes=1 << 20, frames=3, sealed=True, created_at=1
    )
    with fake_daemon(tmp_path, Answers(segments=[segment])) as address:
        assert run(["inspect", "segments", "-a", address]) == 0
        assert "ff.seg" in capsys.readouterr().out
        assert run(["inspect", "segments", "-a", address, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["segments"][0]["segment"] == "00000000000000ff"


def test_an_empty_store_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_daemon(tmp_path, Answers()) as address:
        assert run(["inspect", "namespaces", "-a", address]) == 0
        assert run(["inspect", "segments", "-a", address]) == 0
        assert run(["inspect", "blocks", "--hash", "00", "-a", address]) == 2
    shown = capsys.readouterr()
    assert "no namespace" in shown.out
    assert "no segment" in shown.out
    assert "there is: none" in shown.err


def test_choosing_a_namespace() -> None:
    views = [NamespaceView(TINY, 0, 0, 0), NamespaceView(OTHER, 0, 0, 0)]
    assert choose_namespace(views, "tiny") == TINY
    assert choose_namespace(views, OTHER.fingerprint.hex()[:12].upper()) == OTHER
    assert choose_namespace(views[:1], "") == TINY
    with pytest.raises(InvalidArgument, match=r"there are 2 namespaces.*\(tiny\).*\(other\)"):
        choose_namespace(views, "")
    with pytest.raises(InvalidArgument, match="no namespace fits 'none'"):
        choose_namespace(views, "none")


@pytest.mark.parametrize("text", ["[1, 2, 3]", "1 2 3", "1,2,3\n", " 1\n2\n3 "])
def test_tokens_are_read_as_json_or_numbers(text: str) -> None:
    assert read_tokens(text, "file") == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "one", "[1, null]", "[1"])
def test_other_tokens_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--tokens file"):
        read_tokens(text, "file")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "{short}"], "3 tokens are no full block; one has 4"),
        (["--keys", "00ff"], "64 hex digits"),
        (["--hash", "0"], "even number of hex digits"),
    ],
)
def test_bad_names_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short"
    short.write_text("1 2 3")
    with fake_daemon(tmp_path, Answers(namespaces=[info(TINY)])) as address:
        given = [option.format(short=short) for option in options]
        assert run(["inspect", "blocks", *given, "-a", address]) == 2
    assert message in capsys.readouterr().err
