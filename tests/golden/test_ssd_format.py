"""The bytes of the disk format, pinned: a change here is a new version, and a reader for the old one."""

from __future__ import annotations

import hashlib
import hmac
import mmap
import os
import struct
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.clock import ManualClock
from kvstore.events import Events
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.testing.frames import Block, digests_of, part_image
from kvstore.testing.tier_suite import found_frames
from kvstore.tiers.base import (
    FrameHeader,
    FrameKind,
    FrameLocation,
    FrameWrite,
    PartImage,
    SliceTouch,
    TouchNote,
)
from kvstore.tiers.fs import OsFileSystem
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.crypto_keys import KeyRing, KeyTable, tenant_key
from kvstore.tiers.ssd.format import decode_frame, encode_frame
from kvstore.types import BlockHash
from tests.support.ssd import open_ssd, recovered_ssd

NAMESPACE = Namespace(
    model="golden",
    weights="v1",
    layout=Layout.single(dtype="int8", bytes_max=3000, layers=3, segments=3),
    block_tokens=16,
)
KEYS = bytes(range(64))
PAYLOADS = (b"\x01" * 3000, b"\x02" * 1500)
"""The second ends inside its second segment: the third has no bytes."""


def golden_segment(directory: Path, keys: KeyRing | None = None) -> bytes:
    """Write one frame of two blocks with everything fixed, and return the segment file."""
    part = NAMESPACE.layout.parts[0]
    blocks = [Block(payload, digests_of(payload, part)) for payload in PAYLOADS]
    header = FrameHeader(
        namespace=NAMESPACE.fingerprint,
        kind=FrameKind.MAIN,
        parent=BlockHash(b"\xee" * 32),
        keys=KEYS,
        parts=(part,),
        retention_class="agent",
        written_at=1_700_000_000.5,
        provenance=640,
    )
    image = part_image(part, blocks)
    for view in image.images:
        mask_unused(view, [len(payload) for payload in PAYLOADS])
    tier = SsdTier(
        directory,
        fs=OsFileSystem(),
        clock=ManualClock(),
        events=Events(),
        capacity_bytes=1 << 20,
        min_free_bytes=0,
        queue_bytes_max=1 << 20,
        entropy=lambda size: b"\x5a" * size,
        keys=keys,
    )
    list(tier.recover())
    tier.register(NAMESPACE)
    location = tier.write([FrameWrite(header, (image,), "agent-42")])[0].result(30.0).location
    assert location is not None
    tier.close(deadline_seconds=30.0)
    return (directory / "segments" / f"{1:016x}.seg").read_bytes()


def mask_unused(view: memoryview, lengths: list[int]) -> None:
    """What lies between payload and trailer is whatever the slot held; here it is zeros."""
    assert isinstance(view.obj, mmap.mmap)
    content = bytes(view)
    view[:] = content.replace(b"\xaa", b"\0")


@pytest.fixture
def segment(tmp_path: Path) -> bytes:
    return golden_segment(tmp_path)


def test_the_whole_file(segment: bytes) -> None:
    assert len(segment) == 5 * 4096
    assert hashlib.sha256(segment).hexdigest() == WHOLE_FILE


def test_the_segment_header(segment: bytes) -> None:
    assert segment[:144].hex() == SEGMENT_HEADER
    assert not any(segment[144:4080])


def test_the_frame_header(segment: bytes) -> None:
    assert segment[4096 : 4096 + 364].hex() == FRAME_HEADER
    assert not any(segment[4096 + 364 : 8176])


def test_the_trailer(segment: bytes) -> None:
    second = segment[12288 : 12288 + 4096]
    assert second[:1500] == PAYLOADS[1]
    assert second[-256:].hex() == TRAILER


def test_an_encrypted_record(tmp_path: Path) -> None:
    """As FORMAT.md tells it, opened here by other means than the tier's."""
    secret = bytes(range(32))
    table = KeyTable({"": (tenant_key(77, secret),)})
    segment = golden_segment(tmp_path, KeyRing(lambda: table))
    assert hashlib.sha256(segment).hexdigest() == WHOLE_FILE_ENCRYPTED
    header, record = segment[4096:8192], segment[12288:16384]
    check = hmac.digest(secret, b"kvstore ssd key check v1", "sha256")[:4]
    assert (header[136:140], header[240:244]) == (b"\x4d\0\0\0", check)
    trailer = record[-256:]
    assert (trailer[60:64], trailer[224:228], trailer[228:232]) == (b"\x4d\0\0\0", b"\1\0\0\0", check)
    derived = hmac.digest(b"\x5a" * 16, secret, "sha256")
    data_key = hmac.digest(derived, b"kvstore ssd frame v1" + b"\1\0\0\0" + b"\1", "sha256")
    nonce = (0).to_bytes(4, "little") + (1).to_bytes(8, "little")
    bound = trailer[:96] + trailer[224:232] + b"\x5a" * 16 + (4096).to_bytes(8, "little")
    secret_bytes = record[:-256] + trailer[96:224] + trailer[232:248]
    opened = AESGCM(data_key).decrypt(nonce, secret_bytes, bound)
    assert opened[:1500] == PAYLOADS[1]
    assert not any(opened[1500:-128])
    assert opened[-128:].hex() == TRAILER[192:448]
    assert trailer[:60].hex() == TRAILER[:120]


def test_the_seal(segment: bytes) -> None:
    assert segment[16384 : 16384 + 72].hex() == SEAL


def test_the_header_of_a_frame_that_was_touched_before_it_was_written() -> None:
    """The touch lies in bytes that are zero without one, and that an older build does not read."""
    part = NAMESPACE.layout.parts[0]
    image = PartImage(part, (memoryview(bytearray(4096)),), bytes(4), bytes(48))
    header = FrameHeader(NAMESPACE.fingerprint, FrameKind.MAIN, BlockHash(bytes(32)), KEYS[:32], (part,),
                         "agent", 1_700_000_000.5)  # fmt: skip
    pages = [
        encode_frame(FrameWrite(written, (image,), "agent-42"), segment_id=b"\x5a" * 16, sequence=0)
        for written in (header, replace(header, touched_at=1_700_000_100.5))
    ]
    assert [index for index in range(4080) if pages[0][index] != pages[1][index]] == [*range(246, 252)]
    assert pages[1][244:252].hex() == "00002059fc54d941"
    assert decode_frame(pages[1]).touched_at == 1_700_000_100.5


def test_the_rows_of_touches(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    slices = (SliceTouch(0, 2, "agent", 1_700_000_000.5), SliceTouch(2, 3, "chat", 1_700_000_100.5))
    tier.annotate([TouchNote(FrameLocation(1, 4096, 4096, 12288), slices)])
    tier.close(deadline_seconds=30.0)
    assert index_rows(tmp_path, b"touches") == {bytes.fromhex(TOUCH_KEY): bytes.fromhex(TOUCH_ROW)}


def test_touches_of_the_version_before_are_read(tmp_path: Path) -> None:
    """One touch of the whole frame, in an index of version 2; the next commit makes it one of version 3."""
    golden_segment(tmp_path)
    (row,) = index_rows(tmp_path, b"frames").values()
    body = bytes([2]) + row[1:-8]
    touch = struct.pack("<d32s", 1_700_000_100.5, b"chat")
    digests = [xxhash.xxh3_64_digest(data, seed=4096) for data in (body, touch)]
    key = bytes.fromhex(TOUCH_KEY)
    write_rows(tmp_path, {b"frames": {key: body + digests[0]}, b"touches": {key: touch + digests[1]}},
               version=2)  # fmt: skip
    tier = open_ssd(tmp_path)
    (found,) = found_frames(tier)
    assert found.touches == (SliceTouch(0, 2, "chat", 1_700_000_100.5),)
    assert not tier.report().rebuilt
    tier.annotate([TouchNote(found.location, (SliceTouch(0, 1, "chat", 1_700_000_200.5),))])
    tier.close(deadline_seconds=30.0)
    assert index_rows(tmp_path, b"meta")[b"meta"][:4] == (3).to_bytes(4, "little")
    again = open_ssd(tmp_path)
    assert found_frames(again)[0].touches == (SliceTouch(0, 1, "chat", 1_700_000_200.5),)
    again.close(deadline_seconds=30.0)


def index_rows(directory: Path, table: bytes) -> dict[bytes, bytes]:
    with lmdb.open(str(directory / "index"), max_dbs=4) as env:
        db = env.open_db(table)
        with env.begin() as txn:
            return dict(txn.cursor(db=db))


def write_rows(directory: Path, rows: dict[bytes, dict[bytes, bytes]], *, version: int) -> None:
    with lmdb.open(str(directory / "index"), max_dbs=4) as env:
        tables = {name: env.open_db(name) for name in (b"meta", *rows)}
        with env.begin(write=True) as txn:
            meta = txn.get(b"meta", db=tables[b"meta"])
            assert meta is not None
            txn.put(b"meta", version.to_bytes(4, "little") + meta[4:], db=tables[b"meta"])
            for name, some in rows.items():
                for key, value in some.items():
                    txn.put(key, value, db=tables[name])


def test_the_store_file(tmp_path: Path) -> None:
    golden_segment(tmp_path)
    assert (tmp_path / "STORE").read_text() == (
        '{"created_at": 1700000000.0, "format": 1, "store": "5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a"}\n'
    )
    assert os.listdir(tmp_path / "namespaces") == [f"{NAMESPACE.fingerprint.hex()}.json"]
    assert (
        tmp_path / "namespaces" / f"{NAMESPACE.fingerprint.hex()}.json"
    ).read_bytes() == NAMESPACE.canonical()


TOUCH_KEY = "00000000000000010000000000001000"
TOUCH_ROW = (
    "000000000200000000002040fc54d9416167656e74000000000000000000000000000000000000000000000000000000"
    "020000000300000000002059fc54d9416368617400000000000000000000000000000000000000000000000000000000"
    "0afa16240325923b"
)
WHOLE_FILE_ENCRYPTED = "1893491f2d6da24d15087a76758e9a0b5bc462cd7749d1fe9db8d5fbd8aeaad3"
WHOLE_FILE = "9aebf66c6a3b40a572605f3832b936343b287dcc340ad5d00a8d0ebd95648e5f"
SEGMENT_HEADER = (
    "4b565345474d4e5401000000000000005a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a"
    "00000040fc54d94101000000000000006167656e742d3432000000000000000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
)
FRAME_HEADER = (
    "4b564652414d4500010001000010000000300000000000005a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a0000000000000000"
    "b09383b9b9e4208064da6b9f241a42bcbd6ba713ac994c1289bc75a1a8747f7eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee"
    "eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee020000000100000000002040fc54d94180020000000000000000000000000000"
    "6167656e740000000000000000000000000000000000000000000000000000006167656e742d34320000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "0000000000000000000000000000000000000300b80b000000100000e8030000e8030000e80300000000000000000000"
    "000000000000000000000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20212223"
    "2425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"
)
TRAILER = (
    "4b56525401000300202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3fdc05000080020000"
    "00002040fc54d94100000000000000006167656e74000000000000000000000000000000000000000000000000000000"
    "4fcdef3fabea85722a045e76e82987739b455d4905b137946661a6119f02c2e899aa06d3014798d86001c324468d497f"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "00000000000000009fbd2b4557b799c4"
)
SEAL = (
    "4b565345414c4544010000000010000000100000000000005a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a0100000000000000"
    "0100000000000000004000000000000000000040fc54d941"
)
