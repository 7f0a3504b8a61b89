"""Every byte of the key format, pinned: a change here is a new key version, and all stored blocks become
unreachable.
"""

from __future__ import annotations

import dataclasses

import pytest

from kvstore import hashing
from kvstore.errors import InvalidArgument
from kvstore.layout import Layout
from kvstore.namespace import Namespace, differences, refuse_other_layout
from kvstore.types import Addressing, BlockHash, Fingerprint


def _namespace() -> Namespace:
    return Namespace(
        model="example/model",
        weights="blake2b:0011",
        layout=Layout.single(dtype="bfloat16", bytes_max=4096, layers=4, segments=2),
        block_tokens=16,
        dtype="bfloat16",
        rope='{"theta":10000}',
        engine="engine 1.0",
        packing="nhd",
        tenant="acme",
    ).checked()


def test_canonical_form() -> None:
    assert _namespace().canonical() == (
        b'{"identity":{"adapter":"","addressing":"chain","block_tokens":16,"dtype":"bfloat16",'
        b'"engine":"engine 1.0","model":"example/model","packing":"nhd","quantisation":"","replay":"no",'
        b'"rope":"{\\"theta\\":10000}","tenant":"acme","weights":"blake2b:0011"},'
        b'"layout":{"dtype":"bfloat16","groups":[["kv","full_history",0]],'
        b'"parts":[["kv","all",4096,[[0,2,0,2048],[2,2,2048,2048]]]]},"version":1}'
    )


def test_fingerprint_vector() -> None:
    assert (
        _namespace().fingerprint.hex() == "a6b17a6f468e4ab6ae06a8633268d0222e656b16d52535f45a31e5f25cf4ce37"
    )


def test_chain_root_vectors() -> None:
    fingerprint = Fingerprint(bytes(range(32)))
    assert (
        hashing.chain_root(fingerprint).hex()
        == "d2468fc154df8021348c52d1d41cb8b27df5efdbfefb0d694c9639dea3ed8856"
    )
    assert (
        hashing.chain_root(fingerprint, tenant_secret=b"secret").hex()
        == "f5c815d0d621742ab5db8f8fdd2878d38dc5c1604b6efafeb613ab29ba7a8e82"
    )
    assert (
        hashing.chain_root(fingerprint, tenant_secret=b"s" * 100).hex()
        == "3bd7d361e5ca2d1795aa0f929ce4bbac2df0459e31952a1bdfed33b0ab343e39"
    )


def test_block_hash_vectors() -> None:
    parent = BlockHash(bytes(32))
    packed = hashing.block_hashes(parent, list(range(8)), block_tokens=4)
    assert packed[:32].hex() == "798725ec520e6ce4937815d9e2baee87a412d9b489d393846e1c3d795cad7b46"
    assert packed[32:].hex() == "d19eb631cfcde20302f23c74fe2ffe4b213f7464c3b114019066c0443ba230d8"
    pictures = hashing.block_hashes(parent, list(range(8)), block_tokens=4, extra_keys={1: [b"image digest"]})
    assert pictures[:32] == packed[:32]
    assert pictures[32:].hex() == "38318c98bb645523a3e9f168637b5b8adb8edce8aeb12da67fcc5759624f73ec"


def test_reroot_vector() -> None:
    assert (
        hashing.reroot(BlockHash(bytes(32)), [b"x" * 32]).hex()
        == "0896ea8b2dc5876c60ae40236ff5d3e2e1051d5b54cfb027550cb02678e69ea6"
    )


def test_a_partial_block_has_no_name() -> None:
    assert hashing.block_hashes(BlockHash(bytes(32)), [1, 2, 3], block_tokens=4) == b""


def test_tokens_may_be_numpy_or_list_and_continue_a_chain() -> None:
    import numpy as np

    parent = BlockHash(bytes(32))
    whole = hashing.block_hashes(parent, list(range(12)), block_tokens=4)
    assert hashing.block_hashes(parent, np.arange(12, dtype=np.int32), block_tokens=4) == whole
    assert hashing.block_hashes(BlockHash(whole[:32]), list(range(4, 12)), block_tokens=4) == whole[32:]


@pytest.mark.parametrize("tokens", [[-1, 0, 0, 0], [2**32, 0, 0, 0], [[1, 2], [3, 4]]])
def test_bad_tokens_are_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="tokens"):
        hashing.block_hashes(BlockHash(bytes(32)), tokens, block_tokens=4)


def test_short_foreign_hashes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least 16"):
        hashing.reroot(BlockHash(bytes(32)), [b"12345678"])


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "blake2b:0012"},
        {"rope": '{"theta":20000}'},
        {"dtype": "float16"},
        {"quantisation": "int8"},
        {"engine": "engine 1.1"},
        {"packing": "amx"},
        {"adapter": "lora:1"},
        {"tenant": "other"},
        {"block_tokens": 32},
        {"addressing": Addressing.FLAT},
        {"model": "example/other"},
        {"replay": "swa"},
    ],
)
def test_whatever_changes_the_bytes_changes_the_name(change: dict[str, object]) -> None:
    ours, theirs = _namespace(), dataclasses.replace(_namespace(), **change)  # type: ignore[arg-type]
    assert ours.fingerprint != theirs.fingerprint
    assert hashing.chain_root(ours.fingerprint) != hashing.chain_root(theirs.fingerprint)
    (line,) = differences(ours, theirs)
    assert next(iter(change)) in line and "stored" in line and "offered" in line


def test_same_identity_with_another_layout_is_refused_with_both_sides() -> None:
    from kvstore.errors import LayoutMismatch

    theirs = dataclasses.replace(
        _namespace(), layout=Layout.single(dtype="bfloat16", bytes_max=8192, layers=4)
    )
    with pytest.raises(LayoutMismatch, match=r"4096.*8192"):
        refuse_other_layout(_namespace(), theirs)


def test_canonical_form_round_trips() -> None:
    assert Namespace.from_canonical(_namespace().canonical()) == _namespace()


@pytest.mark.parametrize(
    "form", [b"", b"[]", b'{"version":2}', b'{"version":1,"identity":{},"layout":{}}', b"\xff"]
)
def test_broken_canonical_forms_are_refused(form: bytes) -> None:
    with pytest.raises(InvalidArgument):
        Namespace.from_canonical(form)
