"""Split-KV attention for rows with one query token, balanced over the GPU whatever the mix of lengths.

A row's keys are cut into tiles and its tiles into tasks of one common size, chosen on the device so that there are
about as many tasks as the GPU runs at once. The task map is made once a step and read by every layer. A task
handles one key head for the whole group of query heads that share it (packed into the rows of the matrix product).
A row with one task writes its output; others leave float32 partials, which a second kernel merges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.attention_tile import LOG2E, load_tile, softmax_step
from wavecore.kernels.batch import Batch
from wavecore.kernels.device import num_multiprocessors

TASKS_PER_MULTIPROCESSOR = 4
MERGE_BLOCK = 16


@dataclass(frozen=True, slots=True)
class _TaskMap:
    """Device tensors of the step's tasks, and room for their partial results.

    Attributes:
        task_row, task_split: int32 [tasks], which row, which of its splits.
        first_task: int32 [R + 1].
        chunk: int32 [1], tiles a task.
        partial: float32 [tasks, Hq, D]; weight_log: float32 [tasks, Hq], log2 of the sum of exponentials.
    """

    task_row: Tensor
    task_split: Tensor
    first_task: Tensor
    chunk: Tensor
    partial: Tensor
    weight_log: Tensor


def decode_attention(
    out: Tensor,
    q: Tensor,
    pages: Tensor,
    layer: int,
    batch: Batch,
    scale: float,
    soft_cap: float,
    window: int,
    zero_padding: bool,
) -> None:
    """Write the tokens of rows with one query token into out [T, Hq * D]; zeros for padding tokens if asked."""
    tokens, heads, dim = q.shape
    _, num_layers, _, kv_heads, page_size, _ = pages.shape
    rows = len(batch.seq_lens)
    tile, warps, stages = _shape(dim, q.dtype)
    key = ("decode_tasks", window, heads, tile)
    if key not in batch.shared:
        batch.shared[key] = _map_tasks(batch, kv_heads, heads, dim, window, tile)
    tasks: _TaskMap = batch.shared[key]
    block_d = triton.next_power_of_2(dim)
    _decode[(len(tasks.task_row), kv_heads)](
        q,
        pages,
        batch.block_tables,
        batch.block_tables.stride(0),
        batch.query_start,
        batch.seq_lens,
        tasks.task_row,
        tasks.task_split,
        tasks.first_task,
        tasks.chunk,
        out,
        tasks.partial,
        tasks.weight_log,
        layer,
        num_layers,
        rows,
        scale * LOG2E,
        soft_cap * LOG2E,
        HAS_CAP=soft_cap != 0.0,
        WINDOW=window,
        HQ=heads,
        HKV=kv_heads,
        DIM=dim,
        PAGE=page_size,
        BLOCK_G=max(16, triton.next_power_of_2(heads // kv_heads)),
        BLOCK_D=block_d,
        TILE=tile,
        num_warps=warps,
        num_stages=stages,
    )
    _merge[(max(rows, tokens) if zero_padding else rows, heads)](
        batch.query_start,
        tasks.first_task,
        tasks.partial,
        tasks.weight_log,
        out,
        rows,
        tokens,
        ZERO_PADDING=zero_padding,
        HQ=heads,
        DIM=dim,
        BLOCK_D=block_d,
        BLOCK_S=MERGE_BLOCK,
        num_warps=1 if dim <= 128 else 2,
    )


def _shape(dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Keys a tile, warps, stages. Loads go through the block table, so 5 stages keep two tiles in flight."""
    if dtype == torch.float32:
        return (32, 4, 2) if dim <= 128 else (16, 4, 2)
    return (64, 4, 5) if dim <= 128 else (32, 4, 5)


def _map_tasks(batch: Batch, kv_heads: int, heads: int, dim: int, window: int, tile: int) -> _TaskMap:
    device, rows = batch.seq_lens.device, len(batch.seq_lens)
    target = max(1, num_multiprocessors(device) * TASKS_PER_MULTIPROCESSOR // kv_heads)
    tasks = target + rows  # rounding up gives each row at most one task more than its share

    def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    made = _TaskMap(
        task_row=room(tasks),
        task_split=room(tasks),
        first_task=room(rows + 1),
        chunk=room(1),
        partial=room(tasks, heads, dim, dtype=torch.float32),
        weight_log=room(tasks, heads, dtype=torch.float32),
    )
    _make_tasks[(1,)](
        batch.query_start,
        batch.seq_lens,
        made.task_row,
        made.task_split,
        made.first_task,
        made.chunk,
        rows,
        target,
        WINDOW=window,
        TILE=tile,
        BLOCK_R=triton.next_power_of_2(rows),
        num_warps=4,
    )
    return made


@triton.jit(do_not_specialize=["num_rows", "target"])
def _make_tasks(
    query_start_ptr,
    seq_lens_ptr,
    task_row_ptr,
    task_split_ptr,
    first_task_ptr,
    chunk_ptr,
    num_rows,
    target,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.arange(0, BLOCK_R)
    inside = row < num_rows
    length = tl.load(seq_lens_ptr + row, mask=inside, other=0)
    begin = tl.load(query_start_ptr + row, mask=inside, other=0)
    end = tl.load(query_start_ptr + row + 1, mask=inside, other=0)
    tiles = (length + TILE - 1) // TILE
    if WINDOW:
        tiles -= tl.maximum(length - WINDOW, 0) // TILE
    tiles = tl.where(end - begin == 1, tiles, 0)
    chunk = tl.maximum((tl.sum(tiles) + target - 1) // target, 1)
    splits = (tiles + chunk - 1) // chunk
    last = tl.cumsum(splits)
    first = last - splits
    tl.store(first_task_ptr + row, first, mask=inside)
    tl.store(first_task_ptr + num_rows, tl.sum(splits))
    tl.store(chunk_ptr, chunk)
    for split in range(0, tl.max(splits)):
        tl.store(task_row_ptr + first + split, row, mask=split < splits)
        tl.store(task_split_ptr + first + split, split, mask=split < splits)


@triton.jit(do_not_specialize=["layer", "num_layers", "num_rows"])
def _decode(
    q_ptr,
    pages_ptr,
    tables_ptr,
    table_stride,
    query_start_ptr,
    seq_lens_ptr,
    task_row_ptr,
    task_split_ptr,
    first_task_ptr,
    chunk_ptr,
    out_ptr,
    partial_ptr,
    weight_log_ptr,
    layer,
    num_layers,
    num_rows,
    scale,
    soft_cap,
    HAS_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    task = tl.program_id(0)
    kv_head = tl.program_id(1)
    if task >= tl.load(first_task_ptr + num_rows):
        return
    row = tl.load(task_row_ptr + task)
    split = tl.load(task_split_ptr + task)
    chunk = tl.load(chunk_ptr)
    length = tl.load(seq_lens_ptr + row)
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(length - WINDOW, 0)
    begin = (first_key // TILE + split * chunk) * TILE
    end = tl.minimum(begin + chunk * TILE, length)

    GROUP: tl.constexpr = HQ // HKV
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    here = (g < GROUP)[:, None] & (d < DIM)[None, :]
    token = tl.load(query_start_ptr + row).to(tl.int64)
    head = (kv_head * GROUP + g)[:, None]
    q = tl.load(q_ptr + (token * HQ + head) * DIM + d[None, :], mask=here, other=0.0)

    page_stride = num_layers.to(tl.int64) * (2 * HKV * PAGE * DIM)
    k_offset = (layer.to(tl.int64) * (2 * HKV) + kv_head) * (PAGE * DIM)
    v_offset = k_offset + HKV * PAGE * DIM
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        visible = (key < end) & (key >= first_key)  # never empty: a task's tiles all hold visible keys
        k = load_tile(pages_ptr, table_ptr, k_offset, page_stride, key, visible, True, PAGE, DIM, BLOCK_D)
        v = load_tile(pages_ptr, table_ptr, v_offset, page_stride, key, visible, True, PAGE, DIM, BLOCK_D)
        acc, peak, total = softmax_step(
            q, k, v, acc, peak, total, visible[None, :], scale, soft_cap, HAS_CAP, True, GUARD=False
        )

    acc = acc / total[:, None]
    first = tl.load(first_task_ptr + row)
    if tl.load(first_task_ptr + row + 1) - first == 1:
        tl.store(out_ptr + (token * HQ + head) * DIM + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=here)
    else:
        place = task.to(tl.int64) * HQ + kv_head * GROUP + g
        tl.store(partial_ptr + place[:, None] * DIM + d[None, :], acc, mask=here)
        tl.store(weight_log_ptr + place, peak + tl.log2(total), mask=g < GROUP)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _merge(
    query_start_ptr,
    first_task_ptr,
    partial_ptr,
    weight_log_ptr,
    out_ptr,
    num_rows,
    num_tokens,
    ZERO_PADDING: tl.constexpr,
    HQ: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    index = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    kind = out_ptr.dtype.element_ty
    if ZERO_PADDING:
        padding = (index < num_tokens) & (index >= tl.load(query_start_ptr + num_rows))
        target = out_ptr + (index.to(tl.int64) * HQ + head) * DIM + d
        tl.store(target, tl.zeros([BLOCK_D], kind), mask=padding & (d < DIM))
    if index >= num_rows:
        return
    token = tl.load(query_start_ptr + index)
    if tl.load(query_start_ptr + index + 1) - token != 1:
        return
    first = tl.load(first_task_ptr + index)
    last = tl.load(first_task_ptr + index + 1)
    if last - first == 1:
        return
    acc = tl.zeros([BLOCK_D], tl.float32)  # stays zero for a row of length 0, which has no task
    peak = float("-inf")
    total = 0.0
    for start in range(first, last, BLOCK_S):
        task = start + tl.arange(0, BLOCK_S)
        there = task < last
        place = task.to(tl.int64) * HQ + head
        weight_log = tl.load(weight_log_ptr + place, mask=there, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(weight_log))
        weight = tl.exp2(weight_log - new_peak)
        shrink = tl.exp2(peak - new_peak)
        mask = there[:, None] & (d < DIM)[None, :]
        part = tl.load(partial_ptr + place[:, None] * DIM + d[None, :], mask=mask, other=0.0)
        acc = acc * shrink + tl.sum(part * weight[:, None], axis=0)
        total = total * shrink + tl.sum(weight)
        peak = new_peak
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (token.to(tl.int64) * HQ + head) * DIM + d, acc.to(kind), mask=d < DIM)
