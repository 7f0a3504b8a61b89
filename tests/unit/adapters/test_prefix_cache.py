"""A request resumes from what is stored, answers as if nothing were, and survives whatever the store does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from engine_adapters.transformers import PrefixCache
from engine_adapters.transformers.engine import generate_without_store
from engine_adapters.transformers.prefix_cache import hit_blocks
from kvstore.errors import InvalidArgument, Overloaded
from kvstore.types import MissReason, ReleaseOutcome, Tier
from tests.support.tiny_model import tiny_model, tokens
from tests.unit.adapters.dict_store import DictStore

if TYPE_CHECKING:
    from kvstore.client import Client

BLOCK = 16


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def cache_of(model: Any, store: DictStore, **options: Any) -> PrefixCache:
    return PrefixCache(model, cast("Client", store), block_tokens=BLOCK, **options)


def plain(model: Any, ids: list[int], count: int) -> tuple[int, ...]:
    return tuple(generate_without_store(model, ids, max_new_tokens=count, on_token=lambda: None))


def test_a_second_request_resumes_and_answers_the_same(model: Any) -> None:
    store, ids = DictStore(), tokens(200)
    cold = cache_of(model, store).generate(ids, max_new_tokens=12)
    warm = cache_of(model, store).generate(ids, max_new_tokens=12)
    assert cold.ids == warm.ids == plain(model, ids, 12)
    assert (cold.hit_tokens, cold.prefill.reason) == (0, MissReason.NEVER_STORED)
    assert (warm.hit_tokens, warm.computed_tokens, warm.prefill.reason) == (176, 24, None)
    assert hit_blocks(warm.tiers) == {"host": 2, "ssd": 9}
    assert (
        warm.prompt_saved.present == 1
    )  # the block that the hit left to compute, for the sake of its row count
    assert store.released == [(11, ReleaseOutcome.USED)]


def test_the_stored_prefix_really_counts(model: Any) -> None:
    store, ids = DictStore(), tokens(100)
    cache = cache_of(model, store)
    cold = cache.prefill(ids)
    for name, row in store.blocks.items():
        store.blocks[name] = bytes(len(row))
    assert not torch.allclose(cold.logits, cache.prefill(ids).logits, atol=1e-2)


def test_equal_row_counts_give_equal_bits(model: Any) -> None:
    store, ids = DictStore(), tokens(150)
    cache = cache_of(model, store)
    past = cache.engine.resume([])
    cache.engine.forward(ids[:128], past)
    logits = cache.engine.forward(ids[128:], past)
    cache.save(ids, past)
    warm = cache.prefill(ids)
    assert warm.hit_tokens == 128
    assert torch.equal(warm.logits, logits)


@pytest.mark.parametrize(
    ("prompt", "hit"), [(1, 0), (15, 0), (16, 0), (31, 0), (32, 16), (47, 16), (48, 32), (49, 32), (64, 48)]
)
def test_a_hit_leaves_enough_rows_to_compute(model: Any, prompt: int, hit: int) -> None:
    store, ids = DictStore(), tokens(64)
    cache_of(model, store).prefill(ids)
    result = cache_of(model, store).prefill(ids[:prompt])
    assert (result.hit_tokens, result.reason) == (hit, None)
    assert result.computed_tokens >= min(prompt, 16)


def test_one_row_is_the_least(model: Any) -> None:
    store, ids = DictStore(), tokens(65)
    cache = cache_of(model, store, suffix_tokens_min=1)
    cache.prefill(ids)
    assert cache.prefill(ids).hit_tokens == 64
    with pytest.raises(InvalidArgument, match="suffix_tokens_min is 0"):
        cache_of(model, store, suffix_tokens_min=0)
    with pytest.raises(InvalidArgument, match="no tokens"):
        cache.prefill([])


def test_an_answer_is_a_prefix_of_the_next_turn(model: Any) -> None:
    store, ids = DictStore(), tokens(50)
    first = cache_of(model, store).generate(ids, max_new_tokens=40)
    assert (first.prompt_saved.stored, first.answer_saved.stored) == (3, 2)  # 89 of 90 tokens were computed
    following = [*ids, *first.ids, *tokens(20, seed=8)]
    second = cache_of(model, store).generate(following, max_new_tokens=8)
    assert second.hit_tokens == 80
    assert second.ids == plain(model, following, 8)
    assert first.keys == second.keys[: len(first.keys)]


def test_saving_can_be_left_out(model: Any) -> None:
    store, ids = DictStore(), tokens(50)
    cache = cache_of(model, store)
    cache.generate(ids, max_new_tokens=20, save_prompt=False, save_answer=False)
    assert not store.blocks
    cache.generate(ids, max_new_tokens=20, save_answer=False)
    assert len(store.blocks) == 3
    cache.generate(ids, max_new_tokens=20, save_prompt=False)
    assert len(store.blocks) == 4


def test_a_library_loop_can_resume(model: Any) -> None:
    store, ids = DictStore(), tokens(90)
    cache = cache_of(model, store)
    cache.prefill(ids)
    resumed = cache.resume(ids)
    rows = torch.tensor([ids])
    options = {"attention_mask": torch.ones_like(rows), "do_sample": False, "pad_token_id": 0}
    answer = model.generate(rows, past_key_values=resumed.past, max_new_tokens=10, **options)
    assert resumed.hit_tokens == 64
    assert tuple(answer[0, 90:].tolist()) == plain(model, ids, 10)
    assert cache.save(answer[0], resumed.past, first_block=5).stored == 1


def test_ids_come_as_lists_arrays_and_tensors(model: Any) -> None:
    ids = tokens(40)
    cache = cache_of(model, DictStore())
    answers = [
        cache.generate(given, max_new_tokens=3).ids for given in (ids, torch.tensor(ids), torch.tensor([ids]))
    ]
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(InvalidArgument, match="one request at a time"):
        cache.prefill(torch.tensor([ids, ids]))


def test_a_stop_token_ends_the_answer(model: Any) -> None:
    ids = tokens(40)
    answer = plain(model, ids, 8)
    result = cache_of(model, DictStore()).generate(ids, max_new_tokens=8, stop_ids=frozenset({answer[3]}))
    assert result.ids == answer[: answer.index(answer[3]) + 1]


@pytest.mark.parametrize("verb", ["match", "fetch", "release", "put"])
@pytest.mark.parametrize("error", [Overloaded("full"), RuntimeError("a bug")])
def test_a_failing_store_never_fails_a_request(model: Any, verb: str, error: Exception) -> None:
    store, ids = DictStore(), tokens(100)
    cache_of(model, store).prefill(ids)
    store.raises[verb] = error
    result = cache_of(model, store).generate(ids, max_new_tokens=6)
    assert result.ids == plain(model, ids, 6)
    if verb == "put":
        assert result.prompt_saved.reason is MissReason.TIER_DOWN
        assert store.calls.count("put") == 2  # the first request's and one that failed
    else:
        assert (result.hit_tokens, result.prefill.reason) == (0, MissReason.TIER_DOWN)


def test_a_request_given_up_in_a_fetch_gives_its_lease_back(model: Any) -> None:
    store, ids = DictStore(), tokens(100)
    cache_of(model, store).prefill(ids)
    store.raises["fetch"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        cache_of(model, store).prefill(ids)
    assert store.released == [(0, ReleaseOutcome.UNUSED)]


@pytest.mark.parametrize("delivered", [0, 1, 3])
def test_a_short_delivery_is_a_short_hit(model: Any, delivered: int) -> None:
    store, ids = DictStore(), tokens(100)
    cache_of(model, store).prefill(ids)
    store.fetch_stops_at = delivered
    result = cache_of(model, store).generate(ids, max_new_tokens=6)
    assert (result.hit_tokens, result.prefill.reason) == (16 * delivered, MissReason.CORRUPT)
    assert result.ids == plain(model, ids, 6)
    used = ReleaseOutcome.USED if delivered else ReleaseOutcome.UNUSED
    assert store.released[-1] == (delivered, used)
    assert sum(hit_blocks(result.tiers).values()) == delivered


def test_a_long_prompt_is_saved_in_portions(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(model, DictStore())
    monkeypatch.setattr(
        "engine_adapters.transformers.prefix_cache.SAVE_BYTES_MAX", 4 * cache.engine.shape.block_bytes
    )
    store, ids = DictStore(), tokens(170)
    cold = cache_of(model, store).generate(ids, max_new_tokens=4)
    assert store.calls.count("put") == 3
    assert (cold.prompt_saved.blocks, cold.prompt_saved.stored) == (10, 10)
    assert cache_of(model, store).generate(ids, max_new_tokens=4).ids == cold.ids


def test_a_full_store_keeps_the_head_and_says_why(model: Any) -> None:
    store, ids = DictStore(put_blocks_max=3), tokens(170)
    cold = cache_of(model, store).generate(ids, max_new_tokens=30)
    assert cold.answer_saved.blocks == 0  # not tried again
    assert (cold.prompt_saved.present, cold.prompt_saved.reason) == (3, MissReason.THROTTLED)
    warm = cache_of(model, store).generate(ids, max_new_tokens=4)
    assert (warm.hit_tokens, warm.prefill.reason) == (48, MissReason.NEVER_STORED)


def test_models_that_differ_do_not_meet(model: Any) -> None:
    store, ids = DictStore(), tokens(100)
    cache_of(model, store).prefill(ids)
    for other in (tiny_model(seed=2), tiny_model(rope_theta=20000.0)):
        result = cache_of(other, store).generate(ids, max_new_tokens=6)
        assert result.hit_tokens == 0
        assert result.ids == plain(other, ids, 6)
    assert cache_of(model, store, tenant_secret=b"s").prefill(ids).hit_tokens == 0


def test_a_foreign_past_is_refused(model: Any) -> None:
    cache = cache_of(model, DictStore())
    other = cache_of(tiny_model(num_key_value_heads=4), DictStore())
    with pytest.raises(InvalidArgument, match="layer 0 is"):
        cache.save(tokens(40), other.prefill(tokens(40)).past)


def test_the_hit_is_the_same_in_half_precision() -> None:
    half, store, ids = tiny_model(dtype=torch.bfloat16), DictStore(), tokens(100)
    cold, warm = cache_of(half, store).prefill(ids), cache_of(half, store).prefill(ids)
    assert warm.hit_tokens == 80
    assert torch.allclose(cold.logits.float(), warm.logits.float(), atol=0.5)


def test_what_was_fetched_does_not_live_in_the_staging_memory(model: Any) -> None:
    store, one, other = DictStore(), tokens(150), tokens(150, seed=5)
    cold = cache_of(model, store)
    cold.prefill(one)
    cold.prefill(other)
    staged = cache_of(model, store, staging_bytes=1 << 20)
    first = staged.resume(one)
    staged.resume(other)  # goes through the same memory
    again = cache_of(model, store).resume(one)
    for (keys, values), (keys_again, values_again) in zip(
        staged.engine.layers(first.past), staged.engine.layers(again.past), strict=True
    ):
        assert torch.equal(keys, keys_again)
        assert torch.equal(values, values_again)


def test_what_would_come_slower_than_it_is_computed_is_not_loaded(model: Any) -> None:
    store, ids = DictStore(), tokens(200)
    cache = cache_of(model, store)
    cold = cache.generate(ids, max_new_tokens=4)
    store.block_seconds = {Tier.HOST: 0.0, Tier.SSD: 3600.0}
    part = cache.generate(ids, max_new_tokens=4)
    assert (part.hit_tokens, part.prefill.reason) == (2 * BLOCK, MissReason.SLOWER_THAN_RECOMPUTE)
    store.block_seconds = {Tier.HOST: 3600.0, Tier.SSD: 3600.0}
    none = cache.generate(ids, max_new_tokens=4)
    assert (none.hit_tokens, none.prefill.reason) == (0, MissReason.SLOWER_THAN_RECOMPUTE)
    assert cold.ids == part.ids == none.ids
    assert store.released[-1] == (0, ReleaseOutcome.UNUSED)
