"""What the metadata of a GGUF file says about its model. Knows no torch."""

from dataclasses import replace

from wavecore.engine_core.api.gguf_file import LLAMA_CPP, GgufFile
from wavecore.engine_core.models.spec import MAX_LAYERS, Fields, ModelSpec, Rope, checked
from wavecore.transport.errors import ModelError, NotSupportedError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"


def from_gguf(file: GgufFile) -> ModelSpec:
    """The spec that a GGUF file's metadata describes.

    Raises:
        NotSupportedError: another architecture or rope scaling.
        ModelError: naming the file and the field that is missing or cannot be true.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        names = ", ".join(sorted(ARCHITECTURES))
        raise NotSupportedError(f"{file.path}: GGUF architecture {arch!r:.40}; supported are {names}")
    prefix = f"{arch}."
    read = Fields({k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}, file.path)
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    heads, hidden = read.whole("attention.head_count"), read.whole("embedding_length")
    layers = read.whole("block_count", high=MAX_LAYERS)
    head_dim = read.whole("attention.key_length", hidden // heads)
    rope = _rope(file, read, head_dim)
    spec = ModelSpec(
        architecture=ARCHITECTURES[arch],
        vocab_size=embed.shape[0],
        hidden_size=hidden,
        intermediate_size=read.whole("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_model_len=rope.reach,
        rms_norm_eps=read.real("attention.layer_norm_rms_epsilon", 1e-6),
        tied="output.weight" not in file.tensors,
        windows=(0,) * layers,
        ropes=(rope,),
        rope_of_layer=(0,) * layers,
        scale=head_dim**-0.5,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        dtype="float16" if embed.kind.name == "F16" else "bfloat16",
    )
    return checked(spec, file.path)


def end_token_ids(file: GgufFile) -> list[int]:
    """The tokens that the metadata names as an end of the text, and added ones whose text says so.

    Converters seldom name more than one, so llama.cpp knows the others by their texts. It takes tokens of any type; a
    normal one may well be text, so only control and user-defined ones (types 3 and 4) count here.
    """
    named = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in LLAMA_CPP["end_keys"]]
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types, strict=False))
        named += [i for i, (text, kind) in pairs if kind in (3, 4) and text in LLAMA_CPP["end_texts"]]
    return [i for i in named if type(i) is int]


def _rope(file: GgufFile, read: Fields, head_dim: int) -> Rope:
    length = read.whole("context_length")
    kind = read.values.get("rope.scaling.type", "none")
    rope = Rope(
        theta=read.real("rope.freq_base", 1e4),
        dim=read.whole("rope.dimension_count", head_dim),
        kind="default" if kind == "none" else kind,
        settings={
            "factor": read.real("rope.scaling.factor", 1.0, above_zero=True),
            "original_max_position_embeddings": read.whole("rope.scaling.original_context_length", length),
            "max_position_embeddings": length,
        },
        path=file.path,
    )
    if rope.kind not in ("default", "linear", "yarn"):
        raise NotSupportedError(f"{file.path}: rope scaling {kind!r:.40}; supported are none, linear and yarn")
    factors = file.tensors.get(ROPE_FACTORS)
    if factors is None:
        return rope
    if factors.shape != (rope.dim // 2,):
        raise ModelError(f"{file.path}: tensor {ROPE_FACTORS} has shape {factors.shape}, not ({rope.dim // 2},)")
    return replace(rope, kind="factors", settings={**rope.settings, "factors": file.floats(factors).tolist()})
