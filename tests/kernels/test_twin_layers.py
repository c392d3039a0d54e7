"""The twins of norm, rotary embedding, cache write, activations, input preparation and copies against formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wavecore.kernels.batch import BatchBuffers
from wavecore.kernels.examples import make_batch, make_kv_cache, rope_table, step_rows, tables
from wavecore.kernels.reference import layers

BLOCK_SIZE = 4


def norm_formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope_formula(x: Tensor, position: int, rot: int, base: float = 10000.0) -> Tensor:
    """Pairs (i, i + rot / 2) turned by position * base ** (-2 i / rot)."""
    out = x.clone()
    for i in range(rot // 2):
        angle = position * base ** (-2 * i / rot)
        a, b = x[..., i], x[..., i + rot // 2]
        out[..., i] = a * math.cos(angle) - b * math.sin(angle)
        out[..., i + rot // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_residual", [False, True])
def test_add_rms_norm(offset: float, with_residual: bool) -> None:
    x, residual, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    x[0], residual[0], x[1], residual[1] = 0, 0, x[1] * 1e-3, residual[1] * 1e-3  # eps decides
    before = x.clone(), residual.clone()
    normed, total = layers.add_rms_norm(x, residual if with_residual else None, weight, 1e-5, offset)
    want = x.double() + (residual.double() if with_residual else 0)
    torch.testing.assert_close(total.double(), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        normed.double(), norm_formula(want, weight.double() + offset, 1e-5), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_gated_activations() -> None:
    x = torch.randn(3, 40)
    gate, up = x.double().chunk(2, -1)
    silu = gate / (1 + torch.exp(-gate)) * up
    cubic = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    gelu = 0.5 * gate * (1 + torch.tanh(cubic)) * up
    before = x.clone()
    torch.testing.assert_close(layers.silu_mul(x).double(), silu, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(layers.gelu_tanh_mul(x).double(), gelu, atol=1e-6, rtol=1e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize("rot, with_norm, offset", [(64, False, 0.0), (32, True, 0.0), (64, True, 1.0)])
def test_norm_rope_write(rot: int, with_norm: bool, offset: float) -> None:
    heads, kv_heads, dim, layer = 4, 2, 64, 1
    batch, num_blocks = make_batch([1, 1, 6], [9, 1, 7], BLOCK_SIZE, pad_rows=1, pad_tokens=2)
    qkv = torch.randn(10, (heads + 2 * kv_heads) * dim)
    qkv[0], qkv[1], qkv[-2:] = 0, qkv[1] * 1e-3, math.nan  # eps decides; padding
    q_norm, k_norm = (torch.randn(dim), torch.randn(dim)) if with_norm else (None, None)
    kv_cache = make_kv_cache(num_blocks, 2, kv_heads, BLOCK_SIZE, dim, qkv)
    kv_cache[0] = 1
    before = kv_cache.clone()
    q = layers.qk_norm_rope_kv_write(
        qkv, q_norm, k_norm, 1e-6, rope_table(16, rot, "cpu"), batch, kv_cache, layer, heads, kv_heads, offset
    )
    want_cache = before.double()
    for t in range(8):
        parts = qkv[t].double().view(-1, dim)
        wq, wk, wv = parts[:heads], parts[heads : heads + kv_heads], parts[heads + kv_heads :]
        if q_norm is not None and k_norm is not None:
            wq = norm_formula(wq, q_norm.double() + offset, 1e-6)
            wk = norm_formula(wk, k_norm.double() + offset, 1e-6)
        position, kv_slot = int(batch.positions[t]), int(batch.kv_slots[t])
        torch.testing.assert_close(q[t].double(), rope_formula(wq, position, rot), atol=1e-5, rtol=1e-5)
        want_cache[kv_slot // BLOCK_SIZE, layer, 0, :, kv_slot % BLOCK_SIZE] = rope_formula(wk, position, rot)
        want_cache[kv_slot // BLOCK_SIZE, layer, 1, :, kv_slot % BLOCK_SIZE] = wv
    torch.testing.assert_close(kv_cache.double(), want_cache, atol=1e-5, rtol=1e-5)
    assert torch.equal(kv_cache[:, 0], before[:, 0])
    assert torch.equal(kv_cache[0], before[0]) and not q[-2:].any()  # padding


def test_prepare_batch() -> None:
    query_lens, seq_lens = [1, 1, 5, 3], [9, 1, 7, 3]
    rows = step_rows(query_lens, seq_lens, "cpu", pad_rows=2, pad_tokens=3)
    token_table, block_table, _ = tables(seq_lens, BLOCK_SIZE, "cpu")
    buffers = BatchBuffers.allocate(32, 8, block_table.shape[1] + 2, "cpu")
    for buffer in buffers:
        buffer.fill_(77)  # what an earlier step left
    batch = layers.prepare_batch(rows, token_table, block_table, BLOCK_SIZE, buffers)
    t = 0
    for row, (queries, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for position in range(length - queries, length):
            assert batch.positions[t] == position
            assert batch.token_ids[t] == token_table[row, position]
            assert batch.kv_slots[t] == block_table[row, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            t += 1
        assert batch.sample_index[row] == t - 1
        blocks = -(-length // BLOCK_SIZE)
        assert torch.equal(batch.block_tables[row, :blocks], block_table[row, :blocks])
    assert t == 10 and len(batch.token_ids) == 13
    assert batch.seq_lens.tolist() == [*seq_lens, 0, 0]
    assert batch.kv_slots[t:].tolist() == [-1] * 3
    assert not batch.token_ids[t:].any() and not batch.positions[t:].any() and not batch.sample_index[4:].any()
    assert batch.shared == {}


def test_copy_blocks() -> None:
    kv_cache = torch.randn(6, 2, 2, 1, BLOCK_SIZE, 8)
    want = kv_cache.clone()
    want[4], want[2] = kv_cache[1], kv_cache[5]
    layers.copy_blocks(kv_cache, torch.tensor([[1, 4], [5, 2]], dtype=torch.int32))
    assert torch.equal(kv_cache, want)
    layers.copy_blocks(kv_cache, torch.empty(0, 2, dtype=torch.int32))
    assert torch.equal(kv_cache, want)


def test_changes_of_the_block_table() -> None:
    """Two of three count."""
    table = torch.arange(15, dtype=torch.int32).view(3, 5)
    want = table.clone()
    want[0, 3], want[2, 1] = 70, 80
    layers.update_block_table(table, torch.tensor([2, 0, 3, 70, 2, 1, 80, 1, 1, 90], dtype=torch.int32))
    assert torch.equal(table, want)
