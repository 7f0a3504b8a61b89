"""Blocks hold exactly the keys and values that went in, in the order that the layout says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine_adapters.transformers.packing import KeysValues, KvShape
from kvstore.errors import InvalidArgument

SHAPE = KvShape(layers=6, kv_heads=2, head_dim=4, dtype=torch.float32, block_tokens=8)
CPU = torch.device("cpu")


def state(shape: KvShape, tokens: int) -> list[KeysValues]:
    generator = torch.Generator().manual_seed(tokens)
    size = (1, shape.kv_heads, tokens, shape.head_dim)
    halves = [torch.randn(size, generator=generator).to(shape.dtype) for _ in range(2 * shape.layers)]
    return list(zip(halves[::2], halves[1::2], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "first", "count"), [(8, 0, 1), (40, 0, 5), (47, 0, 5), (47, 2, 3), (47, 4, 1)]
)
def test_what_went_in_comes_out(dtype: torch.dtype, tokens: int, first: int, count: int) -> None:
    shape = replace(SHAPE, dtype=dtype)
    source = state(shape, tokens)
    blocks = shape.pack(source, first_block=first, count=count)
    assert blocks.shape == (count, shape.block_bytes)
    result = shape.unpack(blocks, devices=[CPU] * shape.layers)
    for (keys, values), (keys_out, values_out) in zip(source, result, strict=True):
        part = slice(first * 8, (first + count) * 8)
        assert torch.equal(keys_out, keys[:, :, part])
        assert torch.equal(values_out, values[:, :, part])
        assert keys_out.is_contiguous()


def test_a_segment_holds_its_layers_keys_then_values() -> None:
    source = state(SHAPE, 16)
    blocks = SHAPE.pack(source, first_block=0, count=2)
    for segment in SHAPE.layout().parts[0].segments:
        for layer in range(segment.layer_first, segment.layer_first + segment.layer_count):
            start = segment.offset + (layer - segment.layer_first) * SHAPE.layer_bytes
            got = np.ascontiguousarray(blocks[1, start : start + SHAPE.layer_bytes]).view(np.float32)
            wanted = torch.stack([half[0, :, 8:16] for half in source[layer]]).numpy().reshape(-1)
            assert np.array_equal(got, wanted)


def test_a_state_that_is_a_view_packs_like_its_copy() -> None:
    source = [(k[:, :, 3:], v[:, :, 3:]) for k, v in state(SHAPE, 27)]
    copy = [(k.contiguous(), v.contiguous()) for k, v in source]
    assert np.array_equal(
        SHAPE.pack(source, first_block=0, count=3), SHAPE.pack(copy, first_block=0, count=3)
    )


@pytest.mark.parametrize(
    ("layers", "segments"), [(1, 1), (4, 4), (8, 8), (12, 6), (30, 6), (31, 1), (32, 8), (80, 8)]
)
def test_layers_cut_into_equal_segments(layers: int, segments: int) -> None:
    shape = replace(SHAPE, layers=layers)
    layout = shape.layout()
    assert len(layout.parts[0].segments) == segments
    assert layout.block_bytes == layers * 2 * 2 * 8 * 4 * 4


def test_another_shape_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="5 layers given, 6 expected"):
        SHAPE.pack(state(SHAPE, 8)[:5], first_block=0, count=1)
    with pytest.raises(InvalidArgument, match=r"layer 0 is \[1, 2, 8, 4\].*>=16"):
        SHAPE.pack(state(SHAPE, 8), first_block=0, count=2)
    with pytest.raises(InvalidArgument, match=r"torch\.float16"):
        SHAPE.pack(state(replace(SHAPE, dtype=torch.float16), 8), first_block=0, count=1)
