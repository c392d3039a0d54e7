"""Every kernel in every dtype on small shapes at their edges: what compute-sanitizer watches (see CONTRIBUTING.md).

The twins compute on the CPU, so that nearly all that runs on the GPU is ours. Each tensor is moved there alone: without
the caching allocator an access behind its end is outside of any allocation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import pytest
import torch
from tests.kernels.attention.attention_case import compare as compare_attention
from tests.kernels.attention.attention_case import inputs, poisoned
from tests.kernels.test_compile import launched as kernels
from torch import Tensor
from triton.runtime.jit import JITFunction

from wavecore.kernels import ops
from wavecore.kernels.batch import BatchBuffers
from wavecore.kernels.check import compare
from wavecore.kernels.examples import EXAMPLES, make_batch, make_kv_cache, rope_table, sampling_rows, step_rows, tables

pytestmark = pytest.mark.timeout(600)  # compute-sanitizer slows it by an order of magnitude

Args = tuple[Any, ...]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def norm(like: Tensor) -> Args:
    return torch.randn(5, 577).to(like), torch.randn(5, 577).to(like), torch.randn(577).to(like), 1e-6


def gated(like: Tensor) -> Args:
    return (torch.randn(3, 2 * 1025).to(like),)


def rope(like: Tensor) -> Args:
    """Heads that do not fill the last program, a part of each rotated, rows that end at borders of blocks."""
    batch, num_blocks = make_batch([1, 1, 1, 64, 5], [63, 64, 65, 64, 129], 64, pad_rows=1, pad_tokens=1)
    qkv = torch.randn(len(batch.token_ids), 7 * 96).to(like)
    norms = torch.randn(2, 96).to(like)
    return qkv, *norms, 1e-6, rope_table(130, 48, "cpu"), batch, make_kv_cache(num_blocks, 2, 1, 64, 96, like), 1, 5, 1


def preparation(like: Tensor) -> Args:
    lengths = [1] * 300, [*range(1, 301)]
    token_table, block_table, _ = tables(lengths[1], 16, "cpu")
    rows = step_rows(*lengths, "cpu", pad_rows=3, pad_tokens=3)
    return rows, token_table, block_table, 16, BatchBuffers.allocate(303, 303, 20, "cpu")


def long_row(like: Tensor) -> Args:
    x, *others = long_rows(like)
    return x[:1], *others


def long_rows(like: Tensor) -> Args:
    """Neither columns nor values that a program's tiles divide, nor 16 bytes."""
    return torch.randn(5, 2065).to(like), (torch.randn(1021, 2065) / 45).to(like), torch.randn(1021).to(like)


def many_tokens(like: Tensor, hidden: int = 144, inner: int = 80, tokens: int = 150) -> Args:
    """Some experts get more than a tile of them, and some tokens are padding."""
    experts, own = 6, 4
    x, scores = torch.randn(tokens, hidden).to(like), torch.randn(tokens, experts).to(like)
    gate_up, down = torch.randn(own * 2 * inner, hidden) / hidden**0.5, torch.randn(own * hidden, inner) / inner**0.5
    kv_slots = torch.arange(tokens, dtype=torch.int32).masked_fill_(torch.arange(tokens) % 13 == 5, -1)
    return x, scores, gate_up.to(like), down.to(like), kv_slots, 3, True, 2


def whole_steps(like: Tensor) -> Args:
    """For Hopper's products, with columns that do not fill the last program."""
    return many_tokens(like, 192, 64, 250)


def flat_sampling(like: Tensor) -> Args:
    """A nucleus of thousands, which candidates cannot hold, and words that have just begun."""
    n, vocab = 3, 5003
    rows = sampling_rows(
        n,
        vocab,
        "cpu",
        temperature=torch.full((n,), 1.0),
        top_p=torch.full((n,), 0.9),
        word_range=torch.tensor([[0, 1], [0, 2], [2, 2]], dtype=torch.int32),
        word_start=torch.tensor([0, 3, 4], dtype=torch.int32),
        word_tokens=torch.tensor([1, 2, vocab - 1, 7], dtype=torch.int32),
    )
    rows.token_ids[:, 2:4] = torch.tensor([1, 2])
    return (torch.randn(n, vocab) * 0.2).to(like), rows


def copies(like: Tensor) -> Args:
    return torch.randn(5, 2, 2, 3, 16, 67).to(like), torch.tensor([[4, 0], [1, 3]], dtype=torch.int32)


CASES: list[tuple[str, Callable[[Tensor], Args]]] = [
    *EXAMPLES.items(),
    ("add_rms_norm", norm),
    ("silu_mul", gated),
    ("gelu_tanh_mul", gated),
    ("qk_norm_rope_kv_write", rope),
    ("prepare_batch", preparation),
    ("linear", long_row),
    ("linear", long_rows),
    ("moe", many_tokens),
    ("moe", whole_steps),
    ("draw", flat_sampling),
    ("copy_blocks", copies),
]


@dataclass(frozen=True)
class Watched:
    """The tests of one dtype, and the kernels that they have launched so far."""

    dtype: torch.dtype
    launched: set[str] = field(default_factory=set)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    found, run = Watched(request.param), JITFunction.run

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        found.launched.add(self.__name__)
        return run(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", noted)
        yield found


@pytest.mark.parametrize(("name", "make"), CASES, ids=[f"{name}-{make.__name__}" for name, make in CASES])
def test_operation(watched: Watched, name: str, make: Callable[[Tensor], Args]) -> None:
    torch.manual_seed(33)
    arguments = make(torch.empty(0, dtype=watched.dtype))
    assert compare(on_gpu(name), ops.OPERATIONS[name].twin, arguments) is None


def test_paged_attention(watched: Watched) -> None:
    edges, dtype = [0, 1, 15, 16, 17, 70], watched.dtype
    attention([1] * 6, edges, (64, 2, 4), dtype, 16)
    attention([1] * 6 + [15, 16, 17, 3], [*edges, 15, 16, 17, 35], (64, 2, 4), dtype, 16)
    attention([1, 1, 1, 63, 65, 7], [63, 64, 129, 63, 65, 128], (256, 1, 5), dtype, 64)
    for dim in (80, 96):  # heads padded in a block of 128; the last row has tiles that no query masks
        attention([1, 1, 17, 40], [1, 97, 17, 240], (dim, 1, 3), dtype, 16)
    for dim, group in ((64, 4), (80, 3), (256, 5)):
        attention([1] * 5 + [3], [300, 257, 290, 270, 40, 257], (dim, 2, group), dtype, 16, alike=18)


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="the tests before it must run in this process, too")
def test_that_none_is_left_out(watched: Watched) -> None:
    """After the others; the one behind sums over ranks is in tests/kernels/test_all_reduce.py and tests/multi_gpu."""
    absent = {"_all_reduce"} | ({"_few_rows"} if watched.dtype == torch.float32 else set())
    if watched.dtype == torch.float32 or torch.cuda.get_device_capability() != (9, 0):
        absent |= {"_prefill_hopper", "_product"}
    assert watched.launched == kernels() - absent


def attention(
    query_lens: list[int],
    seq_lens: list[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    block_size: int,
    alike: int = 0,
) -> None:
    """The last block, at the end of the memory, holds the first keys of the longest row; the first four rows begin
    with so many blocks of it, or end in them."""
    q, kv_cache, batch = inputs(query_lens, seq_lens, shape, dtype, block_size, "cpu")
    tables, last = batch.block_tables, len(kv_cache) - 1
    first = tables[batch.seq_lens.argmax(), 0].clone()
    tables[:] = torch.where(tables == first, last, torch.where(tables == last, first, tables))
    tables[:4, :alike] = tables[0, :alike].clone()
    there = moved((q, poisoned(kv_cache, 1, batch), 1, batch, shape[0] ** -0.5), "cuda")
    compare_attention(ops.paged_attention(*there).cpu(), q, kv_cache, batch)


def on_gpu(name: str) -> Callable[..., Any]:
    """The operation on copies of its arguments, whose changes are brought back."""

    def run(*args: Any) -> Any:
        there = moved(args, "cuda")
        result = moved(getattr(ops, name)(*there), "cpu")
        for host, device in zip(tensors(args), tensors(there), strict=True):
            host.copy_(device)
        return result

    return run


def moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from tensors(getattr(value, f.name))
