"""Input preparation: one launch writes what changes in the block table, one turns the step's rows and the slots' state
into the batch's tensors."""

import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.batch import Batch, BatchBuffers, StepRows

BLOCK = 256
CHANGES_AT_ONCE = 1024


def update_block_table(block_table: Tensor, changes: Tensor) -> None:
    """See `reference.layers.update_block_table`; how many changes there are, only the device knows."""
    assert block_table.stride(1) == 1 and changes.is_contiguous()
    room = len(changes) // 3
    grid = (triton.cdiv(room, CHANGES_AT_ONCE),)
    _update_block_table[grid](block_table, block_table.stride(0), changes, BLOCK=CHANGES_AT_ONCE)


@triton.jit(do_not_specialize=["table_stride"])
def _update_block_table(table_ptr, table_stride, changes_ptr, BLOCK: tl.constexpr):
    """A program writes BLOCK of the changes, as far as there are so many."""
    change = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = change < tl.load(changes_ptr)
    entry = changes_ptr + 1 + 3 * change
    slot = tl.load(entry, mask=inside, other=0).to(tl.int64)
    index = tl.load(entry + 1, mask=inside, other=0)
    tl.store(table_ptr + slot * table_stride + index, tl.load(entry + 2, mask=inside, other=0), mask=inside)


def prepare_batch(
    rows: StepRows, token_table: Tensor, block_table: Tensor, block_size: int, buffers: BatchBuffers
) -> Batch:
    """See `reference.layers.prepare_batch`."""
    count, tokens, width = len(rows.slots), rows.bucket_tokens, block_table.shape[1]
    assert token_table.stride(1) == 1 and block_table.stride(1) == 1
    assert width <= buffers.block_tables.shape[1]
    token_programs = triton.cdiv(tokens, BLOCK)
    planned = rows.slots, rows.starts, rows.query_start
    slots = token_table, token_table.stride(0), block_table, block_table.stride(0)
    written = buffers, buffers.block_tables.stride(0)
    counts = count, tokens, token_programs, count.bit_length()
    _prepare[(token_programs + count,)](*planned, *slots, *written, *counts, KV_BLOCK=block_size, BLOCK=BLOCK)
    return buffers.view(rows)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "token_programs", "search_steps"])
def _prepare(
    slots_ptr, starts_ptr, query_start_ptr, token_table_ptr, token_stride, block_table_ptr, block_stride, buffers,
    row_stride, num_rows, num_tokens, token_programs, search_steps,
    KV_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first `token_programs` programs take BLOCK tokens each and find their rows; the others take one row each.

    slot indexes the tables of the engine (a request's row in them), row those of the batch.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if program < token_programs:
        token = program * BLOCK + lane
        inside = token < num_tokens
        low = tl.zeros([BLOCK], tl.int32)  # number of rows that end at or before the token
        high = tl.zeros([BLOCK], tl.int32) + num_rows
        for _ in range(search_steps):
            middle = (low + high) // 2
            searching = low < high
            end = tl.load(query_start_ptr + 1 + middle, mask=searching, other=0)
            before = searching & (end <= token)
            low = tl.where(before, middle + 1, low)
            high = tl.where(searching & (end > token), middle, high)
        real = inside & (low < num_rows)
        start = tl.load(starts_ptr + low, mask=real, other=0)
        position = tl.where(real, start + token - tl.load(query_start_ptr + low, mask=real, other=0), 0)
        slot = tl.load(slots_ptr + low, mask=real, other=0).to(tl.int64)
        ids = tl.load(token_table_ptr + slot * token_stride + position, mask=real, other=0)
        block = tl.load(block_table_ptr + slot * block_stride + position // KV_BLOCK, mask=real, other=0).to(tl.int64)
        tl.store(buffers.token_ids + token, ids, mask=inside)
        tl.store(buffers.positions + token, position, mask=inside)
        tl.store(buffers.kv_slots + token, tl.where(real, block * KV_BLOCK + position % KV_BLOCK, -1), mask=inside)
    else:
        row = program - token_programs
        begin = tl.load(query_start_ptr + row)
        after = tl.load(query_start_ptr + row + 1)
        length = tl.where(after > begin, tl.load(starts_ptr + row) + after - begin, 0)
        tl.store(buffers.seq_lens + row, length)
        tl.store(buffers.sample_index + row, tl.where(after > begin, after - 1, 0).to(tl.int64))
        row_slot = tl.maximum(tl.load(slots_ptr + row), 0).to(tl.int64)
        blocks = (length + KV_BLOCK - 1) // KV_BLOCK
        for first in range(0, blocks, BLOCK):
            column = first + lane
            used = column < blocks
            entries = tl.load(block_table_ptr + row_slot * block_stride + column, mask=used, other=0)
            tl.store(buffers.block_tables + row.to(tl.int64) * row_stride + column, entries, mask=used)
