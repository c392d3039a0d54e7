"""Time the kernels of a step on one GPU against their floors: bytes moved, or products, at the rates of `floors.py`.

    python scripts/bench_kernels.py [--only decode]

Each number is the median over replays of a CUDA graph that holds several calls on rotating inputs, so that launch
gaps stay out and small inputs do not all come from the cache. The two ceilings are measured first: they show
whether the card is in its usual state.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from floors import H200
from torch import Tensor

from wavecore.kernels import ops
from wavecore.kernels.batch import BatchBuffers
from wavecore.kernels.examples import make_batch, rope_table, sampling_rows, step_rows, tables
from wavecore.parallel.collectives import ALONE
from wavecore.parallel.sampler import sample

BLOCK_SIZE = 64
Call = Callable[[], object]
SHAPES = {"0.6B": (16, 8, 128), "8B": (32, 8, 128), "135M": (9, 3, 64)}  # query heads, kv heads, head_dim
WEIGHTS = {  # width of the result, and of the input
    "0.6B": {
        "qkv": (4096, 1024),
        "o": (1024, 2048),
        "gate | up": (6144, 1024),
        "down": (1024, 3072),
        "LM head": (151_936, 1024),
    },
    "8B": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate | up": (28_672, 4096),
        "down": (4096, 14_336),
        "LM head": (128_256, 4096),
    },
}
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192)
DECODES = {
    "1 x 1k": [1024],
    "1 x 32k": [32768],
    "32 x 1k": [1024] * 32,
    "256 x 256": [256] * 256,
    "256 x 1k": [1024] * 256,
    "8 x 20k": [20000] * 8,
    "128 of 100 to 8k": [8000 if i % 16 == 0 else 100 + 7 * i for i in range(128)],
}
SHARED = {  # rows, prefixes, tokens of each, tokens of a row's own
    "256 rows, 16 x 1.5k + 200": (256, 16, 1536, 200),
    "512 rows, 16 x 2k + 96": (512, 16, 2048, 96),
    "4 rows, 1 x 16k + 100": (4, 1, 16384, 100),
}
PREFILLS = {
    "1 x 1k": ([1024], [1024]),
    "8 x 1k": ([1024] * 8, [1024] * 8),
    "16 x 1k": ([1024] * 16, [1024] * 16),
    "4 x 4k": ([4096] * 4, [4096] * 4),
    "1 x 8k": ([8192], [8192]),
    "2k at 16k": ([2048], [16384]),
}


def median_us(calls: Sequence[Call], replays: int = 30) -> float:
    """Microseconds a call, from replays of one graph of all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[3:])


def report(name: str, calls: Sequence[Call], moved: float = 0.0, products: float = 0.0) -> None:
    took = median_us(calls)
    cells = f"{name:52s} {took:9.1f} us"
    if moved or products:
        floor = max(moved / H200.bandwidth, products / H200.matrix) * 1e6
        rate = f"{products / took / 1e6:6.0f} TFLOP/s" if products else f"{moved / took / 1e6:6.2f} TB/s"
        cells += f"  floor {floor:8.1f} us  {floor / took:4.0%} {rate}"
    print(cells, flush=True)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def ceilings() -> None:
    source, target = randn(1 << 30), randn(1 << 30)
    report("copy of 2 GiB", [partial(target.copy_, source)] * 3, moved=2 * source.nbytes)
    a, b = randn(8192, 8192), randn(8192, 8192)
    report("matrix product 8192", [partial(torch.matmul, a, b)] * 3, products=2 * 8192.0**3)


def attention_calls(
    model: str, query_lens: list[int], seq_lens: list[int], layers: int, prefixes: int = 0, prefix_len: int = 0
) -> list[Call]:
    """One call a layer; the first builds the task map, as in a model. Each `prefixes`-th row begins alike."""
    heads, kv_heads, dim = SHAPES[model]
    batch, num_blocks = make_batch(query_lens, seq_lens, BLOCK_SIZE, "cuda")
    for first in range(prefixes):
        alike = batch.block_tables[first::prefixes, : prefix_len // BLOCK_SIZE]
        alike[1:] = alike[0].clone()
    kv_cache = randn(num_blocks, layers, 2, kv_heads, BLOCK_SIZE, dim)
    q = randn(sum(query_lens), heads, dim)

    def call(layer: int) -> None:
        if layer == 0:
            batch.shared.clear()
        ops.paged_attention(q, kv_cache, layer, batch, dim**-0.5)

    return [partial(call, layer) for layer in range(layers)]


def decode() -> None:
    for model, (name, lens) in itertools.product(SHAPES, DECODES.items()):
        _, kv_heads, dim = SHAPES[model]
        size = 4.0 * sum(lens) * kv_heads * dim
        layers = max(2, min(32, int(4e9 / size)))
        report(f"decode attention {model} {name}", attention_calls(model, [1] * len(lens), lens, layers), moved=size)
        torch.cuda.empty_cache()


def shared_prefixes() -> None:
    """The floor counts what rows share once; beside it, the same rows that share nothing."""
    for model, (name, (rows, prefixes, prefix_len, own)) in itertools.product(("0.6B", "8B"), SHARED.items()):
        _, kv_heads, dim = SHAPES[model]
        lens = [prefix_len + own] * rows
        for shares in (prefixes, 0):
            calls = attention_calls(model, [1] * rows, lens, 8, shares, prefix_len)
            moved = 4.0 * kv_heads * dim * (sum(lens) - prefix_len * (rows - prefixes) * bool(shares))
            report(f"decode attention {model} {name}{'' if shares else ', alone'}", calls, moved=moved)
            torch.cuda.empty_cache()


def prefill() -> None:
    for model, (name, (queries, lens)) in itertools.product(("0.6B", "8B"), PREFILLS.items()):
        heads, _, dim = SHAPES[model]
        pairs = sum(q * (s - q) + q * q / 2 for q, s in zip(queries, lens, strict=True))
        calls = attention_calls(model, queries, lens, 4)
        report(f"prefill attention {model} {name}", calls, products=4.0 * pairs * heads * dim)


def products() -> None:
    """The matrix products of a layer, and the LM head, each over weights that come from memory."""
    for model, weights in WEIGHTS.items():
        for (name, (out, inner)), rows in itertools.product(weights.items(), ROWS):
            if name == "LM head" and rows > 1024:
                continue  # as many as an engine has requests
            copies = [randn(out, inner) for _ in range(max(2, -(-(200 << 20) // (2 * out * inner))))]
            x = randn(rows, inner)
            moved = 2.0 * (out * inner + rows * (out + inner))
            calls = [partial(ops.linear, x, weight) for weight in copies]
            report(f"{name} {model} {rows} rows", calls, moved=moved, products=2.0 * rows * out * inner)
            torch.cuda.empty_cache()


def experts() -> None:
    """A layer of Qwen3-30B-A3B; experts that no token takes are not read."""
    total, top_k, hidden, inner = 128, 8, 2048, 768
    weights = [
        (randn(total * 2 * inner, hidden) / hidden**0.5, randn(total * hidden, inner) / inner**0.5) for _ in range(2)
    ]
    for tokens in (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        x, scores = randn(tokens, hidden), randn(tokens, total)
        slots = torch.arange(tokens, dtype=torch.int32, device="cuda")
        read = len(set(scores.topk(top_k).indices.flatten().tolist()))
        moved = 2.0 * (3 * read * inner * hidden + 2 * tokens * hidden)
        calls = [partial(ops.moe, x, scores, *both, slots, top_k, True) for both in weights]
        report(f"experts 30B-A3B {tokens} tokens", calls, moved=moved, products=6.0 * tokens * top_k * inner * hidden)


def norms() -> None:
    for tokens, hidden in ((1, 4096), (256, 1024), (256, 4096), (8192, 4096)):
        n = 20 if tokens < 8192 else 4
        weight = randn(hidden)
        calls = [
            partial(ops.add_rms_norm, randn(tokens, hidden), randn(tokens, hidden), weight, 1e-6) for _ in range(n)
        ]
        report(f"add_rms_norm {tokens} x {hidden}", calls, moved=8.0 * tokens * hidden)


def activations() -> None:
    for tokens, inner in ((1, 14336), (256, 3072), (256, 14336), (8192, 14336)):
        n = 20 if tokens < 8192 else 4
        calls = [partial(ops.silu_mul, randn(tokens, 2 * inner)) for _ in range(n)]
        report(f"silu_mul {tokens} x {inner}", calls, moved=6.0 * tokens * inner)


def kv_writes() -> None:
    for model, tokens in (("8B", 1), ("0.6B", 1), ("0.6B", 256), ("8B", 256), ("8B", 8192)):
        heads, kv_heads, dim = SHAPES[model]
        layers = 20 if tokens < 8192 else 4
        queries = [1] * tokens if tokens < 8192 else [2048] * 4
        batch, num_blocks = make_batch(queries, [q + 500 for q in queries], BLOCK_SIZE, "cuda")
        kv_cache = randn(num_blocks, layers, 2, kv_heads, BLOCK_SIZE, dim)
        norm = randn(dim) if model == "0.6B" else None
        width = (heads + 2 * kv_heads) * dim
        table = rope_table(4096, dim, "cuda")
        op = ops.qk_norm_rope_kv_write
        calls = [
            partial(op, randn(tokens, width), norm, norm, 1e-6, table, batch, kv_cache, layer, heads, kv_heads)
            for layer in range(layers)
        ]
        report(f"norm, rope, kv write {model} {tokens} tokens", calls, moved=4.0 * tokens * width)


def copies() -> None:
    """Copy-on-write of blocks of 2 MiB, as `choose_block_size` makes them."""
    for blocks in (1, 16, 256):
        kv_cache = randn(8 * blocks, 32, 2, 8, 16, 128)
        pairs = torch.randperm(8 * blocks, dtype=torch.int32, device="cuda").view(4, blocks, 2)
        calls = [partial(ops.copy_blocks, kv_cache, some) for some in pairs]
        report(f"copy_blocks {blocks} of 2 MiB", calls, moved=kv_cache.nbytes / 4)


def preparation() -> None:
    for rows, length in ((1, 1000), (256, 1000), (1024, 4000)):
        plan = step_rows([1] * rows, [length] * rows, "cuda")
        token_table, block_table, _ = tables([length] * rows, BLOCK_SIZE, "cuda")
        buffers = BatchBuffers.allocate(rows, rows, block_table.shape[1], "cuda")
        calls = [partial(ops.prepare_batch, plan, token_table, block_table, BLOCK_SIZE, buffers)] * 20
        report(f"prepare_batch {rows} rows of {length}", calls)


def sampling() -> None:
    vocab = 151_936
    kinds = {
        "greedy": (0.0, 0, 1.0, 3.0),
        "temperature": (1.0, 0, 1.0, 3.0),
        "top_k 50": (1.0, 50, 1.0, 3.0),
        "top_p 0.9": (1.0, 0, 0.9, 3.0),
        "top_k and top_p": (0.8, 50, 0.95, 3.0),
        "top_p 0.9, flat": (1.0, 0, 0.9, 0.2),
    }
    for rows, (name, (temperature, top_k, top_p, spread)) in itertools.product((1, 32, 256), kinds.items()):
        state = sampling_rows(
            rows,
            vocab,
            "cuda",
            temperature=torch.full((rows,), temperature, device="cuda"),
            top_k=torch.full((rows,), top_k, dtype=torch.int32, device="cuda"),
            top_p=torch.full((rows,), top_p, device="cuda"),
        )
        state = replace(state, truncates=bool(top_k) or top_p < 1, edits=False)
        calls = [partial(sample, randn(rows, vocab) * spread, state, vocab, ALONE) for _ in range(4)]
        report(f"sample {rows} x {vocab} {name}", calls, moved=2.0 * rows * vocab)


GROUPS = {
    f.__name__: f
    for f in (
        ceilings,
        decode,
        shared_prefixes,
        prefill,
        products,
        experts,
        norms,
        activations,
        kv_writes,
        copies,
        preparation,
        sampling,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=GROUPS, action="append", help="a group of kernels; may come several times")
    chosen = parser.parse_args().only
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    torch.manual_seed(0)
    for name in chosen or GROUPS:
        GROUPS[name]()


if __name__ == "__main__":
    main()
