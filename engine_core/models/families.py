"""The model families as a table, and config.json read by it.

One decoder (`decoder.py`) serves them all; a new family is an entry in `FAMILIES` and, where its tensors have other
names, a line in `weights.hf_parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavecore.engine_core.models.spec import MAX_LAYERS, Fields, ModelSpec, Rope, checked
from wavecore.transport.errors import ModelError, NotSupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What sets a family apart from Llama.

    Attributes:
        defaults: config.json fields that the family's files leave out.
        window: which layers have the sliding window: "none", "all", "even" (0, 2, ...), "five_of_six", or "late" (from
            max_window_layers on, where use_sliding_window is set); `layer_types` in config.json goes before it.
        fused: q, k, v and gate, up are already one tensor each in the files.
    """

    defaults: Mapping[str, Any]
    window: str = "none"
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False
    fused: bool = False


GEMMA = {"head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(defaults={}),
    "MistralForCausalLM": Family(defaults={"sliding_window": 4096}, window="all"),
    "Qwen2ForCausalLM": Family(defaults={}, window="late", qkv_bias=True),
    "Qwen3ForCausalLM": Family(defaults={"head_dim": 128}, window="late", qk_norm=True),
    "Gemma2ForCausalLM": Family(
        defaults={**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        window="even",
        gemma=True,
    ),
    "Gemma3ForCausalLM": Family(
        defaults={**GEMMA, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
        window="five_of_six",
        qk_norm=True,
        gemma=True,
    ),
    "Phi3ForCausalLM": Family(defaults={}, window="all", fused=True),
}

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def from_config(config: Mapping[str, Any], path: Path) -> ModelSpec:
    """The spec of a folder in Hugging Face form.

    Args:
        config: its config.json.
        path: of that file, for messages.

    Raises:
        NotSupportedError: an architecture, quantisation or option that is not built in, by name.
        ModelError: a field is missing or cannot be true.
    """
    name, family = _family(config, path)
    read = Fields({**family.defaults, **config}, path)
    heads, hidden = read.whole("num_attention_heads"), read.whole("hidden_size")
    layers = read.whole("num_hidden_layers", high=MAX_LAYERS)
    head_dim = read.whole("head_dim", hidden // heads)
    sliding = _sliding_layers(read, family, layers)
    window = read.whole("sliding_window", 0, low=0)
    ropes = _ropes(read, head_dim)
    bias = bool(read.values.get("attention_bias"))
    scalar = read.real("query_pre_attn_scalar", head_dim, above_zero=True) if family.gemma else head_dim
    return checked(
        ModelSpec(
            architecture=name,
            vocab_size=read.whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.whole("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=read.whole("num_key_value_heads", heads),
            head_dim=head_dim,
            max_model_len=_max_model_len(read, family, ropes[0]),
            rms_norm_eps=read.real("rms_norm_eps", 1e-6),
            tied=bool(read.values.get("tie_word_embeddings", False)),
            windows=tuple(window if slides else 0 for slides in sliding),
            ropes=ropes,
            rope_of_layer=tuple(int(slides and len(ropes) > 1) for slides in sliding),
            scale=scalar**-0.5,
            qkv_bias=family.qkv_bias or bias,
            o_bias=bias,
            mlp_bias=bool(read.values.get("mlp_bias")),
            qk_norm=family.qk_norm,
            gelu=_gelu(read),
            norm_offset=1.0 if family.gemma else 0.0,
            post_norms=family.gemma,
            embed_scale=hidden**0.5 if family.gemma else 1.0,
            attn_soft_cap=read.real("attn_logit_softcapping", 0.0),
            final_soft_cap=read.real("final_logit_softcapping", 0.0),
            dtype=str(read.values.get("dtype") or read.values.get("torch_dtype") or "float32"),
        ),
        path,
    )


def _family(config: Mapping[str, Any], path: Path) -> tuple[str, Family]:
    """The architecture's name and family, if all that the config asks for is built in."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "none"
    if name not in FAMILIES:
        raise NotSupportedError(f"{path}: architecture {name}; built in are {', '.join(sorted(FAMILIES))}")
    if config.get("quantization_config"):
        raise NotSupportedError(f"{path}: quantization_config; use the unquantised model or a .gguf file")
    if config.get("use_bidirectional_attention"):
        raise NotSupportedError(f"{path}: use_bidirectional_attention; only causal models are built in")
    return name, FAMILIES[name]


def _gelu(read: Fields) -> bool:
    """Whether the activation is GELU's approximation by tanh, not SiLU."""
    activation = read.values.get("hidden_activation") or read.values.get("hidden_act") or "silu"
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise NotSupportedError(f"{read.path}: activation {activation!r}; built in are silu and gelu_pytorch_tanh")
    return bool(activation != "silu")


def _sliding_layers(read: Fields, family: Family, layers: int) -> list[bool]:
    given = read.values.get("layer_types")
    if isinstance(given, list):
        if len(given) != layers or any(kind not in ("full_attention", "sliding_attention") for kind in given):
            raise ModelError(f"{read.path}: layer_types must name full_attention or sliding_attention for each layer")
        return [kind == "sliding_attention" for kind in given]
    window = family.window if read.values.get("sliding_window") else "none"
    if window == "late" and not read.values.get("use_sliding_window"):
        window = "none"
    late = read.whole("max_window_layers", 28, low=0) if window == "late" else 0
    slides: Callable[[int], bool] = {
        "none": lambda _: False,
        "all": lambda _: True,
        "even": lambda i: i % 2 == 0,
        "five_of_six": lambda i: (i + 1) % read.whole("sliding_window_pattern", 6) != 0,
        "late": lambda i: i >= late,
    }[window]
    return [slides(i) for i in range(layers)]


def _ropes(read: Fields, head_dim: int) -> tuple[Rope, ...]:
    """One table, or two (full, sliding) where the config gives the sliding layers their own."""
    settings = read.values.get("rope_parameters") or read.values.get("rope_scaling") or {}
    if isinstance(settings, dict) and "full_attention" in settings:
        kinds = ("full_attention", "sliding_attention")
        return tuple(_rope(read, settings.get(kind) or {}, head_dim) for kind in kinds)
    rope = _rope(read, settings, head_dim)
    if read.values.get("rope_local_base_freq"):
        local = {"rope_theta": read.real("rope_local_base_freq", 1e4)}
        return rope, _rope(read, local, head_dim)
    return (rope,)


def _rope(read: Fields, settings: Any, head_dim: int) -> Rope:
    if not isinstance(settings, dict):
        raise ModelError(f"{read.path}: rope settings must be an object, not {settings!r:.40}")
    kind = settings.get("rope_type") or settings.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its name in the first Phi-3 files
    if kind not in ROPE_KINDS:
        raise NotSupportedError(f"{read.path}: rope type {kind!r:.40}; built in are {', '.join(ROPE_KINDS)}")
    inner = Fields({**read.values, **settings}, read.path)
    length = inner.whole("max_position_embeddings", 2048)
    return Rope(
        theta=inner.real("rope_theta", 1e4, above_zero=True),
        dim=int(head_dim * inner.real("partial_rotary_factor", 1.0, above_zero=True)),
        kind=kind,
        settings={
            **settings,
            "original_max_position_embeddings": inner.whole("original_max_position_embeddings", length),
            "max_position_embeddings": length,
        },
    )


def _max_model_len(read: Fields, family: Family, rope: Rope) -> int:
    length = read.whole("max_position_embeddings", 2048)
    if rope.kind in ("linear", "dynamic") and not family.gemma:  # these configs give the length before scaling
        length = int(length * Fields(rope.settings, read.path).real("factor", 1.0, above_zero=True))
    return length
