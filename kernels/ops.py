"""The operations that models call: each picks the Triton kernel on CUDA, the torch twin elsewhere.

`register_op(name, fn)` puts a function of the user's in place of both, once it agrees with the twin.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from wavecore.kernels.batch import Batch, BatchBuffers, StepRows
from wavecore.kernels.sampling.rows import SamplingRows

OPERATIONS = {
    "prepare_batch": ("prepare", "reference.layers"),
    "add_rms_norm": ("norm", "reference.layers"),
    "qk_norm_rope_kv_write": ("kv_write", "reference.layers"),
    "paged_attention": ("attention.paged", "reference.attention"),
    "silu_mul": ("activation", "reference.layers"),
    "gelu_tanh_mul": ("activation", "reference.layers"),
    "sample": ("sampling.sample", "reference.sampling"),
    "copy_blocks": ("copies", "reference.layers"),
}
"""Operation to the modules of `wavecore.kernels` that hold its Triton kernel and its torch twin, under its name."""

_chosen: dict[tuple[str, str], Callable[..., Any]] = {}
_custom: dict[str, Callable[..., Any]] = {}


def kernel_of(name: str) -> Callable[..., Any]:
    """The function that launches an operation's Triton kernel."""
    return _function(OPERATIONS[name][0], name)


def twin_of(name: str) -> Callable[..., Any]:
    """The torch twin of an operation."""
    return _function(OPERATIONS[name][1], name)


def _function(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(import_module(f"wavecore.kernels.{module}"), name)
    return found


def register_op(name: str, fn: Callable[..., Any], like: Tensor) -> None:
    """Replace an operation in this process, on every device.

    Args:
        name: one of `OPERATIONS`.
        fn: takes the arguments of the twin, which has the operation's name in the module that `OPERATIONS` gives, for
            instance `wavecore.kernels.reference.layers.silu_mul`. It is tried at once on small random inputs.
        like: an empty tensor with the dtype and the device of these inputs: where fn will be used.

    Raises:
        ValueError: unknown name, or fn's results differ from the twin's in shape, dtype or value; the message says
            which result differs and by how much.
        check.DidNotRun: fn raised; also a ValueError.
    """
    from wavecore.kernels.check import check_op

    if name not in OPERATIONS:
        raise ValueError(f"there is no operation {name!r}; the names are {', '.join(OPERATIONS)}")
    check_op(name, fn, twin_of(name), like)
    _custom[name] = fn
    _chosen.clear()


def _pick(name: str, tensor: Tensor) -> Callable[..., Any]:
    key = (name, tensor.device.type)
    if key not in _chosen:
        load = kernel_of if tensor.is_cuda else twin_of
        _chosen[key] = _custom[name] if name in _custom else load(name)
    return _chosen[key]


def prepare_batch(
    rows: StepRows, token_table: Tensor, block_table: Tensor, block_size: int, buffers: BatchBuffers
) -> Batch:
    batch: Batch = _pick("prepare_batch", token_table)(rows, token_table, block_table, block_size, buffers)
    return batch


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _pick("add_rms_norm", x)(x, residual, weight, eps, weight_offset)
    return result


def qk_norm_rope_kv_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    batch: Batch,
    kv_cache: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    weight_offset: float = 0.0,
) -> Tensor:
    fn = _pick("qk_norm_rope_kv_write", qkv)
    q: Tensor = fn(qkv, q_norm, k_norm, eps, cos_sin, batch, kv_cache, layer, num_heads, num_kv_heads, weight_offset)
    return q


def paged_attention(
    q: Tensor, kv_cache: Tensor, layer: int, batch: Batch, scale: float, soft_cap: float = 0.0, window: int = 0
) -> Tensor:
    out: Tensor = _pick("paged_attention", q)(q, kv_cache, layer, batch, scale, soft_cap, window)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    out: Tensor = _pick("silu_mul", gate_up)(gate_up)
    return out


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    out: Tensor = _pick("gelu_tanh_mul", gate_up)(gate_up)
    return out


def sample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _pick("sample", logits)(logits, rows)
    return result


def copy_blocks(kv_cache: Tensor, pairs: Tensor) -> None:
    _pick("copy_blocks", kv_cache)(kv_cache, pairs)
