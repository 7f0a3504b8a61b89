"""Two models share blocks only when every byte of their attention state must be equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as library

from engine_adapters.transformers.engine import VERSION, EngineModel
from engine_adapters.transformers.identity import (
    model_namespace,
    positions,
    refuse_length_dependent,
    weights_fingerprint,
)
from kvstore.errors import InvalidArgument
from kvstore.namespace import Namespace, differences
from tests.support.tiny_model import tiny_model

transformers: Any = library


def namespace_of(model: Any, **changes: Any) -> Namespace:
    engine = EngineModel.wrap(model, block_tokens=16)
    options: dict[str, Any] = {
        "model": engine.name,
        "weights": weights_fingerprint(engine.tensors()),
        "engine": VERSION,
        "attention": engine.attention,
    }
    return model_namespace(engine.config, engine.shape, **(options | changes))


def changed_fields(left: Namespace, right: Namespace) -> set[str]:
    return {line.split(":")[0] for line in differences(left, right)}


def test_equal_models_share() -> None:
    assert namespace_of(tiny_model(seed=1)).fingerprint == namespace_of(tiny_model(seed=1)).fingerprint


def test_equal_shape_and_other_weights_never_meet() -> None:
    left, right = namespace_of(tiny_model(seed=1)), namespace_of(tiny_model(seed=2))
    assert left.layout == right.layout
    assert changed_fields(left, right) == {"weights"}
    assert left.fingerprint != right.fingerprint


def test_one_flipped_bit_of_one_weight_is_another_model() -> None:
    model = tiny_model()
    before = namespace_of(model)
    weight = model.model.layers[3].mlp.down_proj.weight
    with torch.no_grad():
        weight.view(torch.int32)[17, 3] ^= 1
    assert changed_fields(before, namespace_of(model)) == {"weights"}


def test_other_rope_alone_never_meets() -> None:
    left, right = namespace_of(tiny_model()), namespace_of(tiny_model(rope_theta=20000.0))
    assert changed_fields(left, right) == {"rope"}
    assert left.fingerprint != right.fingerprint


@pytest.mark.parametrize("change", [{"rms_norm_eps": 1e-5}, {"hidden_act": "gelu"}])
def test_what_is_no_tensor_but_changes_the_bytes_counts(change: dict[str, Any]) -> None:
    assert changed_fields(namespace_of(tiny_model()), namespace_of(tiny_model(**change))) == {"weights"}


def test_dtype_attention_and_tenant_count() -> None:
    plain = namespace_of(tiny_model())
    assert {"dtype", "layout", "weights"} <= changed_fields(
        plain, namespace_of(tiny_model(dtype=torch.bfloat16))
    )
    assert changed_fields(plain, namespace_of(tiny_model(attn_implementation="eager"))) == {"packing"}
    assert changed_fields(plain, namespace_of(tiny_model(), tenant="a")) == {"tenant"}


def test_where_a_model_was_loaded_from_does_not_count() -> None:
    model = tiny_model()
    before = namespace_of(model)
    model.config.name_or_path = "elsewhere"
    model.config.eos_token_id = 3
    assert namespace_of(model).fingerprint == before.fingerprint


def test_the_fingerprint_knows_names_shapes_and_dtypes() -> None:
    ones = torch.ones(2, 3)
    base = weights_fingerprint([("a", ones)])
    assert weights_fingerprint([("b", ones)]) != base
    assert weights_fingerprint([("a", ones.reshape(3, 2))]) != base
    assert weights_fingerprint([("a", ones.view(torch.int32))]) != base
    assert weights_fingerprint([("a", ones.T.contiguous().T)]) == base
    assert weights_fingerprint([("a", ones), ("b", ones)]) == weights_fingerprint([("b", ones), ("a", ones)])
    assert weights_fingerprint([("scalar", torch.tensor(1.0)), ("none", torch.empty(0))])


def test_positions_are_found_by_name() -> None:
    config = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "max_position_embeddings": 9, "hidden_size": 8}
    assert set(positions(config)) == {"rope_theta", "partial_rotary_factor", "max_position_embeddings"}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "longrope"}},
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
        {"text_config": {"rope_scaling": {"type": "longrope"}}},
    ],
)
def test_keys_that_depend_on_the_whole_length_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="depend on the sequence length"):
        refuse_length_dependent(config)


def test_another_dynamic_thing_is_none_of_ours() -> None:
    refuse_length_dependent(
        {"quantization_config": {"type": "dynamic"}, "rope_parameters": {"rope_type": "yarn"}}
    )


def test_other_layer_kinds_are_refused_by_name() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.MistralConfig(**sizes, **heads, sliding_window=8)
    with pytest.raises(InvalidArgument, match="layer 0 of 2 is a DynamicSlidingWindowLayer"):
        EngineModel.wrap(transformers.MistralForCausalLM(config).eval(), block_tokens=16)


def test_training_mode_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"call model\.eval"):
        EngineModel.wrap(tiny_model().train(), block_tokens=16)
