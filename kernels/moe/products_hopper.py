"""The experts' products on Hopper, for many tokens: two warp groups multiply while other warps load.

Programs stay and take tile after tile, so that the next one's operands are on their way while results are stored. The
warp groups have half of a tile's rows each and wait for loads alone, not for each other; the second has nothing to do
where an expert's last tile is half empty. `experts` serves all that this does not hold.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wavecore.kernels.device import capability, num_multiprocessors

ROWS = 128
"""Of a tile, 64 for each warp group; and of weights in shared memory."""
LEAST_PAIRS = 97
"""An expert, from which these are faster than Triton's (measured on an H200)."""
SLOTS = gl.constexpr(4)
"""Steps of 64 places in shared memory."""
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16))
"""How matrix units read 64 places of rows."""
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""How a warp group reads and writes memory: 16 bytes a thread."""
EACH_ROW = gl.constexpr(gl.SliceLayout(1, WIDE.value))
EACH_COLUMN = gl.constexpr(gl.SliceLayout(0, WIDE.value))


def holds(x: Tensor, inner: int, pairs: int) -> bool:
    """Whether the kernel can do it and is the faster one: 16 bits, whole steps, so many pairs an expert."""
    whole = x.element_size() == 2 and not x.shape[1] % 64 and not inner % 64
    return pairs >= LEAST_PAIRS and whole and capability(x.device) == 90


def products(
    x: Tensor, gate_up: Tensor, down: Tensor, parts: Tensor,
    weights: Tensor, order: Tensor, tile_expert: Tensor, top_k: int,
) -> None:  # fmt: skip
    """Fills parts [pairs, H] as `experts._up` and `_down` do. Between them rows lie in order [tiles * ROWS]."""
    hidden, inner = x.shape[1], down.shape[1]
    middle = x.new_empty(len(order), inner)
    sides, halves, rows = (TensorDescriptor.from_tensor(m, [ROWS, 64], SWIZZLED.value) for m in (gate_up, down, middle))
    programs, lists = (num_multiprocessors(x.device),), (weights, order, tile_expert, len(tile_expert) - 1, top_k)
    _product[programs](x, sides, middle, *lists, inner, hidden, GATED=True, num_warps=4)
    _product[programs](rows, halves, parts, *lists, hidden, inner, GATED=False, num_warps=4)


@gluon.jit(do_not_specialize=["tiles"])
def _product(
    x, weight, out_ptr, weights_ptr, order_ptr, tile_expert_ptr, tiles, top_k, width, inner, GATED: gl.constexpr
):  # fmt: skip
    """A program takes every n-th block of 128 rows by two of 128 columns: if GATED of gate and of up, and x is a
    pointer to rows to pick from; else beside each other, and x is a description of rows in order."""
    rows = gl.allocate_shared_memory(weight.dtype, [SLOTS, 128, 64], SWIZZLED)
    columns = gl.allocate_shared_memory(weight.dtype, [2 * SLOTS, 128, 64], SWIZZLED)
    results = gl.allocate_shared_memory(weight.dtype, [2, 64, 128], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=129 if GATED else 1)  # TMA, and each thread that picks rows
        mbarrier.init(empty.index(slot), count=2)
    blocks = gl.cdiv(width, 128 if GATED else 256)
    tasks = (gl.load(tile_expert_ptr + tiles) * blocks, blocks, order_ptr, width, inner)
    ring = (rows, columns, full, empty)
    gl.warp_specialize(
        [
            (_multiply, (0, tasks, ring, results, out_ptr, weights_ptr, GATED)),
            (_multiply, (1, tasks, ring, results, out_ptr, weights_ptr, GATED)),
            (_load, (tasks, ring, x, weight, tile_expert_ptr, top_k, GATED)),
        ],
        worker_num_warps=[4, 4 if GATED else 1],
        worker_num_regs=[232, 40] if GATED else [240, 24],
    )


@gluon.jit
def _load(tasks, ring, x, weight, tile_expert_ptr, top_k, GATED: gl.constexpr):
    """Both operands into the ring, 64 places at once."""
    count, blocks, order_ptr, width, inner = tasks
    rows, columns, full, empty = ring
    item = 0
    for task in range(gl.program_id(0), count, gl.num_programs(0)):
        first = task // blocks * 128
        left = gl.load(tile_expert_ptr + task // blocks) * width
        if GATED:
            left = 2 * left + task % blocks * 128
            pair = gl.load(order_ptr + first + gl.arange(0, 128, layout=EACH_ROW))
            place = (gl.maximum(pair, 0) // top_k).to(gl.int64)[:, None] * inner
            place += gl.arange(0, 64, layout=EACH_COLUMN)[None, :]
        else:
            left += task % blocks * 256
        for begin in range(0, inner, 64):
            slot = item % SLOTS
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), item // SLOTS % 2 ^ 1)
            mbarrier.expect(ready, 128 * (256 if GATED else 384))
            tma.async_copy_global_to_shared(weight, [left, begin], ready, columns.index(2 * slot))
            right = left + (width if GATED else 128)
            tma.async_copy_global_to_shared(weight, [right, begin], ready, columns.index(2 * slot + 1))
            if GATED:  # of pairs that are not real there is something, which stays in its row
                hopper.async_copy.async_copy_global_to_shared(rows.index(slot), x + place + begin, (pair >= 0)[:, None])
                hopper.async_copy.mbarrier_arrive(ready, increment_count=False)
            else:
                tma.async_copy_global_to_shared(x, [first, begin], ready, rows.index(slot))
            item += 1


@gluon.jit
def _multiply(HALF: gl.constexpr, tasks, ring, results, out_ptr, weights_ptr, GATED: gl.constexpr):
    """A warp group: 64 rows of a tile by both blocks of columns."""
    count, blocks, order_ptr, width, inner = tasks
    rows, columns, full, empty = ring
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    element: gl.constexpr = rows.dtype
    result = results.index(HALF)
    start = 0
    for task in range(gl.program_id(0), count, gl.num_programs(0)):
        first = task // blocks * 128 + HALF * 64
        end = start + inner // 64
        if gl.load(order_ptr + first) < 0:  # and so are all behind it
            for item in range(start, end):
                mbarrier.wait(full.index(item % SLOTS), item // SLOTS % 2)
                mbarrier.arrive(empty.index(item % SLOTS))
        else:
            pair = gl.load(order_ptr + first + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC)))
            share = gl.load(weights_ptr + gl.maximum(pair, 0))[:, None]
            left, right = gl.zeros([64, 128], gl.float32, ACC), gl.zeros([64, 128], gl.float32, ACC)
            for item in range(start, end):
                slot = item % SLOTS
                mbarrier.wait(full.index(slot), item // SLOTS % 2)
                if GATED:
                    hopper.fence_async_shared()  # threads wrote what matrix units read
                own = rows.index(slot).slice(HALF * 64, 64)
                left = warpgroup_mma(own, columns.index(2 * slot).permute((1, 0)), left, is_async=True)
                right = warpgroup_mma(own, columns.index(2 * slot + 1).permute((1, 0)), right, is_async=True)
                left, right = warpgroup_mma_wait(2, [left, right])
                mbarrier.arrive(empty.index((item + SLOTS - 1) % SLOTS), pred=item > start)
            left, right = warpgroup_mma_wait(0, [left, right])
            mbarrier.arrive(empty.index((end - 1) % SLOTS))
            left, right = left.to(element).to(gl.float32), right.to(element).to(gl.float32)
            row = first + gl.arange(0, 64, layout=EACH_ROW)
            column = task % blocks * (128 if GATED else 256) + gl.arange(0, 128, layout=EACH_COLUMN)[None, :]
            if GATED:
                result.store(((left / (1.0 + gl.exp(-left))).to(element).to(gl.float32) * right).to(element))
                place = row.to(gl.int64)[:, None] * width + column
                gl.store(out_ptr + place, result.load(WIDE), mask=column < width)
            else:
                target = gl.load(order_ptr + row)[:, None]
                place = target.to(gl.int64) * width + column
                result.store((left * share).to(element))
                gl.store(out_ptr + place, result.load(WIDE), mask=(target >= 0) & (column < width))
                result.store((right * share).to(element))
                gl.store(out_ptr + place + 128, result.load(WIDE), mask=(target >= 0) & (column < width - 128))
        start = end
