"""What config.json comes down to, field by field, against transformers' own config classes and rotary tables."""

from __future__ import annotations

import importlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from wavecore.engine_core.models.families import FAMILIES, from_config
from wavecore.engine_core.models.rope import cos_sin_table
from wavecore.engine_core.models.spec import ModelSpec, Rope
from wavecore.transport.errors import ModelError, NotSupportedError

# A file in which every field differs from its default.
FULL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 1024,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "max_position_embeddings": 640,
    "head_dim": 24,
    "rms_norm_eps": 2e-5,
    "tie_word_embeddings": True,
    "rope_theta": 50_000.0,
    "sliding_window": 24,
    "use_sliding_window": True,
    "max_window_layers": 3,
    "sliding_window_pattern": 3,
    "attention_bias": True,
    "mlp_bias": True,
    "query_pre_attn_scalar": 100,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 10.0,
    "rope_local_base_freq": 20_000.0,
    "original_max_position_embeddings": 320,
    "partial_rotary_factor": 0.5,
    "qkv_bias": False,
    "num_experts": 12,
    "num_local_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 56,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}
UNREAD = {"dtype", "torch_dtype", "rope_scaling", "rope_parameters", "layer_types", "hidden_act", "hidden_activation"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0 + i / 10 for i in range(4)], "long_factor": [2.0 + i for i in range(4)]}
SLIDES = ["sliding_attention", "full_attention"] * 4
NAMES = sorted(FAMILIES)


def file_of(name: str, **changes: Any) -> dict[str, Any]:
    """A config.json of the family: its fields of `FULL`, with some changed."""
    values = {field: FULL[field] for field in FAMILIES[name].fields if field in FULL}
    return {"architectures": [name], **values, **changes}


def reference(name: str, values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """transformers' config of the same file, and its rotary embedding by layer type ("" for all)."""
    family = name.removesuffix("ForCausalLM")
    prefix = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{prefix}Config").from_dict(deepcopy(values))
    file = family.lower().replace("moe", "_moe")
    module = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
    return config, getattr(module, f"{family}RotaryEmbedding")(config)


def assert_same_table(rope: Rope, rotary: Any, layer_type: str | None, length: int) -> None:
    ours = cos_sin_table(rope, length, torch.device("cpu"))
    kind = {} if layer_type is None else {"layer_type": layer_type}
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None], **kind)
    half = rope.dim // 2
    assert cos.shape[-1] == rope.dim
    torch.testing.assert_close(ours[:, :half], cos[0, :, :half], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours[:, half:], sin[0, :, :half], atol=1e-6, rtol=1e-5)


def assert_same_experts(spec: ModelSpec, config: Any) -> None:
    dense, every = getattr(config, "mlp_only_layers", ()), getattr(config, "decoder_sparse_step", 1)
    assert spec.moe_layers == {i for i in range(spec.num_layers) if i not in dense and (i + 1) % every == 0}
    count = getattr(config, "num_experts", None) or config.num_local_experts
    assert (spec.num_experts, spec.experts_per_token) == (count, config.num_experts_per_tok)
    assert spec.expert_size == getattr(config, "moe_intermediate_size", config.intermediate_size)
    assert spec.shared_size == getattr(config, "shared_expert_intermediate_size", 0)
    assert spec.norm_experts == getattr(config, "norm_topk_prob", True)


def assert_as_transformers(name: str, values: dict[str, Any], length: int = 64) -> ModelSpec:
    spec = from_config(values, Path("config.json"))
    config, rotary = reference(name, values)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    assert spec.vocab_size == config.vocab_size
    assert spec.hidden_size == config.hidden_size
    assert spec.intermediate_size == config.intermediate_size
    assert spec.num_layers == config.num_hidden_layers
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (heads, config.num_key_value_heads, head_dim)
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.tied == config.tie_word_embeddings
    assert spec.scale == (getattr(config, "query_pre_attn_scalar", None) or head_dim) ** -0.5
    biased = name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM") or "Gemma" in name
    bias = biased and config.attention_bias
    always = name == "Qwen2ForCausalLM" or (name == "Qwen2MoeForCausalLM" and config.qkv_bias)
    assert (spec.qkv_bias, spec.o_bias) == (bias or always, bias)
    assert spec.mlp_bias == (name == "LlamaForCausalLM" and config.mlp_bias)
    assert spec.attn_soft_cap == (getattr(config, "attn_logit_softcapping", None) or 0.0)
    assert spec.final_soft_cap == (getattr(config, "final_logit_softcapping", None) or 0.0)
    activation = config.hidden_activation if "Gemma" in name else config.hidden_act
    assert spec.gelu == (activation == "gelu_pytorch_tanh")
    window = (name != "LlamaForCausalLM" and config.sliding_window) or 0
    by_layer = ("Qwen" in name and "Qwen3Moe" not in name) or "Gemma" in name
    kinds = config.layer_types if by_layer else ["sliding_attention"] * config.num_hidden_layers
    assert spec.windows == tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if "Moe" in name or name == "MixtralForCausalLM":
        assert_same_experts(spec, config)
    if len(spec.ropes) == 1:
        assert_same_table(spec.ropes[0], rotary, None, length)
    else:
        assert spec.rope_of_layer == tuple(int(kind == "sliding_attention") for kind in kinds)
        assert_same_table(spec.ropes[0], rotary, "full_attention", length)
        assert_same_table(spec.ropes[1], rotary, "sliding_attention", length)
    return spec


@pytest.mark.parametrize("name", NAMES)
def test_every_field_left_out_is_what_transformers_takes(name: str) -> None:
    assert FAMILIES[name].fields.keys() - UNREAD <= FULL.keys(), "a field that this test does not know"
    full = file_of(name)
    assert_as_transformers(name, full)
    for field in full.keys() - {"architectures"}:
        assert_as_transformers(name, {key: value for key, value in full.items() if key != field})
    assert_as_transformers(name, {"architectures": [name]})


LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
GEMMA2, GEMMA3, PHI3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM"
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[
        (name, {"rope_scaling": scaling})
        for name in (LLAMA, MISTRAL, QWEN2, QWEN3)
        for scaling in (
            {"type": "linear", "factor": 4.0},
            {"rope_type": "dynamic", "factor": 2.0},
            YARN,
            {**YARN, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2},
            {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
            {**YARN, "truncate": False},
            {**LLAMA3, "original_max_position_embeddings": 64},
            {"type": "yarn", "factor": 2.0},
        )
    ],
    (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}),
    (LLAMA, {"rope_parameters": {**YARN, "rope_theta": 7e5}, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    (LLAMA, {"num_key_value_heads": None, "head_dim": None}),
    (LLAMA, {"layer_types": SLIDES, "sliding_window": 8}),
    (LLAMA, {"hidden_act": "gelu_pytorch_tanh"}),
    (MISTRAL, {"layer_types": ["full_attention"] * 8}),
    (MISTRAL, {"sliding_window": None}),
    (MISTRAL, {"attention_bias": True}),
    (QWEN2, {"use_sliding_window": False}),
    (QWEN2, {"layer_types": SLIDES}),
    (QWEN2, {"attention_bias": True}),
    (QWEN3, {"sliding_window": None}),
    (GEMMA2, {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    (GEMMA2, {"hidden_act": "silu"}),
    (GEMMA2, {"layer_types": SLIDES[::-1]}),
    (GEMMA2, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    (GEMMA3, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    (GEMMA3, {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5}}}),
    (GEMMA3, {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}}),
    (GEMMA3, {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}}),
    (GEMMA3, {"layer_types": SLIDES}),
    (PHI3, {"rope_scaling": {"type": "yarn", **LONG}}),
    (PHI3, {"rope_scaling": {"type": "longrope", **LONG}, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}),
    (PHI3, {"rope_scaling": {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 100}}),
    (PHI3, {"rope_scaling": {"rope_type": "longrope", **LONG, "factor": 3.0}}),
    (PHI3, {"rope_scaling": {"rope_type": "longrope", **LONG, "attention_factor": 1.25}}),
    (PHI3, {"sliding_window": None}),
]


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_variants_are_read_as_transformers_reads_them(name: str, changes: dict[str, Any]) -> None:
    assert_as_transformers(name, file_of(name, **{"head_dim": 16, **changes}))


def test_forms_that_transformers_reads_no_more() -> None:
    """ "su" is longrope's name in the first Phi-3 files, and null KV heads were those of all heads."""
    path = Path("config.json")
    su, long = (
        from_config(file_of(PHI3, head_dim=16, rope_scaling={"type": kind, **LONG}), path)
        for kind in ("su", "longrope")
    )
    assert su.ropes[0].kind == long.ropes[0].kind == "longrope"
    assert su.max_model_len == long.max_model_len
    assert from_config(file_of(MISTRAL, num_key_value_heads=None), path).num_kv_heads == FULL["num_attention_heads"]


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        (GEMMA3, {"rope_parameters": {"full_attention": 3}}, "rope"),
        (GEMMA3, {"rope_scaling": 3}, "rope"),
        (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (QWEN3, {"layer_types": [[], [], []]}, "layer_types"),
        (QWEN3, {"layer_types": ["full_attention"]}, "layer_types"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": "x"}}, "factor"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor"),
        (PHI3, {"partial_rotary_factor": 0}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_names_the_file_and_the_field(name: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=rf"some/config\.json.*{match}"):
        from_config(file_of(name, **changes), Path("some/config.json"))


# Positions of the file: 64, or the ones given. vLLM derives the same (`_get_and_verify_max_len`).
REACH = [
    (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256),
    (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 256),
    (QWEN3, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}}, 192),
    (QWEN3, {"rope_parameters": YARN, "max_position_embeddings": 256}, 256),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 128),
    (LLAMA, {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8}}, 64),
    (GEMMA2, {"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
    (GEMMA3, {"rope_scaling": {"type": "linear", "factor": 8.0}}, 64),
    (PHI3, {"rope_scaling": {"type": "longrope", **LONG}, "original_max_position_embeddings": 16}, 64),
]


@pytest.mark.parametrize(("name", "changes", "most"), REACH)
def test_scaling_stretches_the_length_that_is_served(name: str, changes: dict[str, Any], most: int) -> None:
    values = file_of(name, **{"max_position_embeddings": 64, "original_max_position_embeddings": None, **changes})
    spec = from_config(values, Path("config.json"))
    assert spec.max_model_len == most


def test_code_that_came_with_a_model_is_passed_over_or_refused_by_the_architecture() -> None:
    own = {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    assert from_config(file_of(PHI3, **own), Path("config.json")).architecture == PHI3
    with pytest.raises(NotSupportedError, match=r"MysteryForCausalLM.*LlamaForCausalLM.*auto_map.*never run"):
        from_config({"architectures": ["MysteryForCausalLM"], **own}, Path("config.json"))
