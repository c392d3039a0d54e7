"""The model families as a table, `families.json`, and config.json read by it.

One decoder (`decoder.py`) serves them all; a new family is an entry in the table and, where its tensors have other
names, lines in `tensor_names.json`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavecore.engine_core.models.spec import MAX_EXPERTS, MAX_LAYERS, Fields, ModelSpec, Rope, checked
from wavecore.transport.errors import ModelError, NotSupportedError
from wavecore.transport.wire.checks import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What sets a family apart from Llama.

    Attributes:
        fields: what it reads of config.json, and what transformers takes where a file leaves it out. Other fields of a
            file are passed over, as transformers does.
        full_every: of each so many layers the last has no sliding window, where config.json does not say it.
        slides_first: every other layer has the window, up to max_window_layers, and not all layers from there on.
        fused: q, k, v and gate, up are already one tensor each in the files.
        experts: what the names of experts' tensors are called in `tensor_names.json`, behind "experts" and "routers".
    """

    fields: Mapping[str, Any]
    full_every: int = MAX_LAYERS + 1
    slides_first: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False
    fused: bool = False
    experts: str = ""


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
_COMMON = _TABLE.pop("every family")
FAMILIES = {name: Family(**{**facts, "fields": {**_COMMON, **facts["fields"]}}) for name, facts in _TABLE.items()}

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
    read = Fields({field: config.get(field, default) for field, default in family.fields.items()}, path)
    heads, hidden = read.whole("num_attention_heads"), read.whole("hidden_size")
    layers = read.whole("num_hidden_layers", high=MAX_LAYERS)
    head_dim = read.whole("head_dim", hidden // heads)
    slides = _sliding_layers(read, family, layers)
    window = read.whole("sliding_window", 0, low=0) if read.values.get("use_sliding_window", True) else 0
    ropes = _ropes(read, head_dim)
    bias = bool(read.values.get("attention_bias"))
    scalar = read.real("query_pre_attn_scalar", above_zero=True) if family.gemma else head_dim
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
            # Of two tables one is scaled, and such configs (Gemma 3) give the length after scaling.
            max_model_len=ropes[0].reach if len(ropes) == 1 else read.whole("max_position_embeddings"),
            rms_norm_eps=read.real("rms_norm_eps"),
            tied=bool(read.values["tie_word_embeddings"]),
            windows=tuple(window if sliding else 0 for sliding in slides),
            ropes=ropes,
            rope_of_layer=tuple(int(sliding and len(ropes) > 1) for sliding in slides),
            scale=scalar**-0.5,
            qkv_bias=family.qkv_bias or bias or bool(read.values.get("qkv_bias")),
            o_bias=bias,
            mlp_bias=bool(read.values.get("mlp_bias")),
            qk_norm=family.qk_norm,
            gelu=_gelu(read, "hidden_activation" if family.gemma else "hidden_act"),
            norm_offset=1.0 if family.gemma else 0.0,
            post_norms=family.gemma,
            embed_scale=hidden**0.5 if family.gemma else 1.0,
            attn_soft_cap=read.real("attn_logit_softcapping", 0.0),
            final_soft_cap=read.real("final_logit_softcapping", 0.0),
            dtype=str(read.values["dtype"] or read.values["torch_dtype"] or "float32"),
            **_experts(read, layers),
        ),
        path,
    )


def _family(config: Mapping[str, Any], path: Path) -> tuple[str, Family]:
    """The architecture's name and family, if all that the config asks for is built in."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "none"
    if name not in FAMILIES:
        own = "; the code that came with it (auto_map) is never run" if "auto_map" in config else ""
        raise NotSupportedError(f"{path}: architecture {name:.80}; built in are {', '.join(sorted(FAMILIES))}{own}")
    for field in ("quantization_config", "quantization", "compression_config"):
        if quantised := config.get(field):
            raise NotSupportedError(f"{path}: {field} {shown(quantised)}; use the unquantised model or a .gguf file")
    if config.get("use_bidirectional_attention"):
        raise NotSupportedError(f"{path}: use_bidirectional_attention; only causal models are built in")
    return name, FAMILIES[name]


def _experts(read: Fields, layers: int) -> dict[str, Any]:
    """The fields of a spec that tell of experts; none where the family has none."""
    if "num_experts_per_tok" not in read.values:
        return {}
    only = read.values.get("mlp_only_layers") or []
    if not isinstance(only, list):
        raise ModelError(f"{read.path}: mlp_only_layers must be a list, not {shown(only)}")
    count = read.whole("num_local_experts", read.whole("num_experts", 0, low=0), low=0, high=MAX_EXPERTS)
    every = read.whole("decoder_sparse_step", 1)
    return {
        "moe_layers": frozenset(i for i in range(layers) if count and i not in only and (i + 1) % every == 0),
        "num_experts": count,
        "experts_per_token": read.whole("num_experts_per_tok") if count else 0,
        "expert_size": read.whole("moe_intermediate_size", read.whole("intermediate_size")),
        "shared_size": read.whole("shared_expert_intermediate_size", 0, low=0),
        "norm_experts": bool(read.values["norm_topk_prob"]),
    }


def _gelu(read: Fields, field: str) -> bool:
    """Whether the activation is GELU's approximation by tanh, not SiLU."""
    activation = read.values[field]
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise NotSupportedError(f"{read.path}: activation {activation!r}; built in are silu and gelu_pytorch_tanh")
    return bool(activation != "silu")


def _sliding_layers(read: Fields, family: Family, layers: int) -> list[bool]:
    """Which layers have the sliding window, if there is one: all, those from one on, or all but each nth."""
    given = read.values.get("layer_types")
    if isinstance(given, list):
        if len(given) != layers or any(kind not in ("full_attention", "sliding_attention") for kind in given):
            raise ModelError(f"{read.path}: layer_types must name full_attention or sliding_attention for each layer")
        return [kind == "sliding_attention" for kind in given]
    first, every = read.whole("max_window_layers", 0, low=0), read.whole("sliding_window_pattern", family.full_every)
    if family.slides_first:
        return [i < first and i % 2 == 0 for i in range(layers)]
    return [i >= first and (i + 1) % every != 0 for i in range(layers)]


def _ropes(read: Fields, head_dim: int) -> tuple[Rope, ...]:
    """One table, or two (full, sliding) for a family that gives the sliding layers their own."""
    given, scaling = (_settings(read, read.values[name]) for name in ("rope_parameters", "rope_scaling"))
    if "rope_local_base_freq" not in read.values:
        return (_rope(read, scaling or given, head_dim),)
    full, sliding = (_settings(read, given.get(kind)) for kind in ("full_attention", "sliding_attention"))
    local = {"rope_theta": read.values["rope_local_base_freq"], **sliding}
    return _rope(read, {**full, **scaling}, head_dim), _rope(read, local, head_dim)


def _settings(read: Fields, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict | None):
        raise ModelError(f"{read.path}: rope settings must be an object, not {given!r:.40}")
    return given or {}


def _rope(read: Fields, settings: dict[str, Any], head_dim: int) -> Rope:
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if "short_factor" in settings and kind in ("su", "yarn"):  # its names in the first Phi-3 files
        kind = "longrope"
    if kind not in ROPE_KINDS:
        raise NotSupportedError(f"{read.path}: rope type {kind!r:.40}; built in are {', '.join(ROPE_KINDS)}")
    length, inner = read.whole("max_position_embeddings"), Fields({**read.values, **settings}, read.path)
    # Where both places give the original length, transformers believes the one outside.
    inside = inner.whole("original_max_position_embeddings", length)
    original = read.whole("original_max_position_embeddings", inside)
    scaled = {**settings, "original_max_position_embeddings": original, "max_position_embeddings": length}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        scaled["factor"] = inner.real("factor", length / original if kind == "yarn" else None, above_zero=True)
    part = inner.real("partial_rotary_factor", above_zero=True) if "partial_rotary_factor" in read.values else 1.0
    theta = inner.real("rope_theta", above_zero=True)
    return Rope(theta=theta, dim=int(head_dim * part), kind=kind, settings=scaled, path=read.path)
