"""The small kernels against their twins, by interpreter or on a GPU."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from tests.kernels.layer_case import close, rounded_once

from wavecore.kernels import ops
from wavecore.kernels.batch import BatchBuffers
from wavecore.kernels.check import compare
from wavecore.kernels.examples import EXAMPLES, make_batch, make_kv_cache, rope_table, step_rows, tables
from wavecore.kernels.ops import OPERATIONS
from wavecore.kernels.reference import layers

pytestmark = pytest.mark.usefixtures("guarded")

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_kernel_twin_and_operation_take_the_same_arguments(name: str) -> None:
    signature = inspect.signature(OPERATIONS[name].twin)
    assert inspect.signature(OPERATIONS[name].kernel) == signature == inspect.signature(getattr(ops, name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_example(device: str, name: str, dtype: torch.dtype) -> None:
    assert (
        compare(
            OPERATIONS[name].kernel, OPERATIONS[name].twin, EXAMPLES[name](torch.empty(0, dtype=dtype, device=device))
        )
        is None
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 64, 576, 1000])
@pytest.mark.parametrize("with_residual", [False, True])
def test_add_rms_norm(device: str, hidden: int, with_residual: bool, dtype: torch.dtype) -> None:
    """A vector of zeros, one so small that eps decides, and one whose squares no 16 bits hold are among them."""
    vectors = torch.randn(2, 4, hidden, device=device)
    vectors[:, 0], vectors[:, 1], vectors[:, 2] = 0, vectors[:, 1] * 1e-3, vectors[:, 2] * 400
    (x, residual), weight = vectors.to(dtype), torch.randn(hidden, device=device).to(dtype)
    args = x, residual if with_residual else None, weight, 1e-5
    assert compare(ops.add_rms_norm.kernel, layers.add_rms_norm, args) is None
    if dtype != torch.float32:
        normed, total = ops.add_rms_norm.kernel(*args)
        rounded_once(normed, layers.add_rms_norm(total.double(), None, weight.double(), 1e-5)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1500, 2048])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_activation_over_several_blocks(device: str, name: str, inner: int, dtype: torch.dtype) -> None:
    """Of which the last is full, or not; small gates show the curve, and large ones its ends."""
    gate_up = torch.randn(2, 2 * inner, device=device)
    gate_up[1] *= 4
    gate_up = gate_up.to(dtype)
    close(OPERATIONS[name].kernel(gate_up), OPERATIONS[name].twin(gate_up.double()), dtype)


@pytest.mark.parametrize(
    "dim, rot, heads, kv_heads", [(64, 64, 5, 2), (96, 96, 1, 1), (128, 32, 2, 1), (256, 256, 3, 2)]
)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rope_write(
    device: str, dim: int, rot: int, heads: int, kv_heads: int, with_norm: bool, dtype: torch.dtype
) -> None:
    """Heads of zeros, and some so small that eps decides, are among them; queries of padding are zero."""
    batch, num_blocks = make_batch([1, 1, 3], [9, 1, 4], 4, device, pad_rows=1, pad_tokens=2)
    qkv = torch.randn(7, (heads + 2 * kv_heads) * dim, device=device)
    qkv[0], qkv[1], qkv[-2:] = 0, qkv[1] * 1e-3, torch.nan
    qkv = qkv.to(dtype)
    q_norm, k_norm = torch.randn(2, dim, device=device).to(dtype) if with_norm else (None, None)
    kv_cache = make_kv_cache(num_blocks, 2, kv_heads, 4, dim, qkv)
    kv_cache[0] = 1  # where KV slot -1 would point to
    table = rope_table(16, rot, device)
    args = qkv, q_norm, k_norm, 1e-6, table, batch, kv_cache, 1, heads, kv_heads, 1.0 if with_norm else 0.0
    assert compare(ops.qk_norm_rope_kv_write.kernel, layers.qk_norm_rope_kv_write, args) is None
    assert not ops.qk_norm_rope_kv_write.kernel(*args)[-2:].any()


@pytest.mark.parametrize(
    "query_lens, seq_lens, pads",
    [([1], [1], (0, 0)), ([1] * 5, [3, 600, 9, 1, 4], (3, 3)), ([1, 300, 2, 500], [8, 300, 9, 777], (2, 30))],
)
def test_prepare_batch(device: str, query_lens: list[int], seq_lens: list[int], pads: tuple[int, int]) -> None:
    rows = step_rows(query_lens, seq_lens, device, *pads)
    token_table, block_table, _ = tables(seq_lens, 2, device)
    buffers = BatchBuffers.allocate(rows.bucket_tokens + 5, len(rows.slots) + 1, block_table.shape[1] + 3, device)
    for buffer in buffers:
        buffer.fill_(77)  # what an earlier step left
    args = rows, token_table, block_table, 2, buffers
    want = layers.prepare_batch(*copy.deepcopy(args))
    got = ops.prepare_batch.kernel(*args)
    for name in ("token_ids", "positions", "kv_slots", "seq_lens", "sample_index", "query_start"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for row, length in enumerate(seq_lens):
        blocks = -(-length // 2)
        assert torch.equal(got.block_tables[row, :blocks], block_table[row, :blocks])
    assert (got.num_decode_rows, got.max_query_len, got.shared) == (want.num_decode_rows, want.max_query_len, {})
    for name in ("token_ids", "positions", "kv_slots"):
        assert (getattr(buffers, name)[rows.bucket_tokens :] == 77).all(), name


def test_copy_blocks_over_several_programs(device: str) -> None:
    kv_cache = torch.randn(4, 3, 2, 2, 16, 64, device=device)
    pairs = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32, device=device)
    assert compare(ops.copy_blocks.kernel, layers.copy_blocks, (kv_cache, pairs)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns, inner", [(5, 16), (70, 576), (9, 1000), (3, 2500), (2049, 264)])
@pytest.mark.parametrize("rows, with_bias", [(1, False), (1, True), (3, True), (16, False)])
def test_linear(device: str, rows: int, columns: int, inner: int, with_bias: bool, dtype: torch.dtype) -> None:
    """Rows that one block holds, and longer ones that blocks divide or do not."""
    shapes = (rows, inner), (columns, inner), columns
    x, weight, bias = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    got = ops.linear.kernel(x, weight, bias if with_bias else None)
    want = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    close(got, want, dtype)
