"""The least time that a workload can take on one GPU: from bytes and operations, by the model's config.

With L layers, weights per layer P_l (matrices only) and in all P (with the LM head), keys and values of C bytes a
token, q query heads of d numbers:

    prefill    max(bytes of the weights / bandwidth, 2 L P_l tokens / matrix rate)
               + 2 L q d (end^2 - start^2) / attention rate, summed over the prompts
    decode     for each step of B rows: max(bytes of the weights / bandwidth, 2 P B / matrix rate)
               + C (tokens of all contexts, each once) / bandwidth

for bfloat16 (P weights are 2 P bytes; C = 4 L k d for k KV heads). Prompts reuse what an earlier one had in common
with them, then all requests decode at once, and what several prompts begin with is read once a step. What the bound
leaves out: the launch of kernels, norms, sampling, the embedding, activations that go through memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from wavecore.engine_core.models.spec import ModelSpec

SHARED = 16  # tokens: what two prompts have in common is counted in whole blocks of the smallest size


@dataclass(frozen=True, slots=True)
class Rates:
    """What a GPU reaches: bytes/s of its memory, FLOP/s of matrix products and of attention over prompts."""

    bandwidth: float
    matrix: float
    attention: float

    def of(self, gpus: int) -> Rates:
        """Of so many GPUs together."""
        return Rates(gpus * self.bandwidth, gpus * self.matrix, gpus * self.attention)


H200 = Rates(bandwidth=4.3e12, matrix=790e12, attention=600e12)
"""One NVIDIA H200, bfloat16. The data sheet says 4.8 TB/s and 989 TFLOP/s (dense). Reached, measured on one: 4.3 TB/s
by a device copy of gigabytes, 790 TFLOP/s by a product of 8192 x 8192 random matrices. Attention: about what the
authors of FlashAttention-3 report for causal prompts of 8k to 16k tokens, head_dim 128, on an H100: the same cores."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model costs, in numbers of weights, FLOPs and bytes.

    Attributes:
        layers, weights: weights of the matrices of all layers; with the LM head.
        weight_bytes: of all these.
        kv_bytes: keys and values of one token.
        pair_flops: of one query with one key, over all layers: two products.
    """

    layers: int
    weights: int
    weight_bytes: int
    kv_bytes: int
    pair_flops: int

    @classmethod
    def of(cls, spec: ModelSpec) -> Costs:
        """Raises ValueError for sliding windows: a query would not see all keys."""
        if any(spec.windows):
            raise ValueError(f"{spec.architecture} with sliding windows: the floors count full attention")
        shapes = spec.shapes().items()
        layers = sum(math.prod(shape) for name, shape in shapes if name.startswith("layers.") and len(shape) == 2)
        weights = layers + spec.vocab_size * spec.hidden_size
        return cls(
            layers=layers,
            weights=weights,
            weight_bytes=2 * weights,
            kv_bytes=2 * spec.kv_values_per_token,
            pair_flops=4 * spec.num_layers * spec.num_heads * spec.head_dim,
        )


def prefill_seconds(costs: Costs, prompts: Sequence[tuple[int, int]], rates: Rates) -> float:
    """The least seconds for the prompts.

    Args:
        prompts: (start, end) of each: tokens that are there already, and all.
    """
    tokens = sum(end - start for start, end in prompts)
    pairs = sum(end**2 - start**2 for start, end in prompts) / 2
    products = max(costs.weight_bytes / rates.bandwidth, 2 * costs.layers * tokens / rates.matrix)
    return products + costs.pair_flops * pairs / rates.attention


def decode_seconds(costs: Costs, requests: Sequence[tuple[int, int]], rates: Rates, saved: int = 0) -> float:
    """The least seconds for the decode steps.

    Args:
        requests: (tokens of the prompt, of the output) of each; the first output token comes from the prefill.
        saved: tokens that steps need not read, as rows share them; see `saved_tokens`.
    """
    ends = Counter(output - 1 for _, output in requests)
    rows, products = len(requests) - ends[0], 0.0
    for step in range(1, max(ends) + 1):
        products += max(costs.weight_bytes / rates.bandwidth, 2 * costs.weights * rows / rates.matrix)
        rows -= ends[step]
    context = sum((output - 1) * prompt + (output - 1) * output // 2 for prompt, output in requests)
    return products + costs.kv_bytes * (context - saved) / rates.bandwidth


def beginnings(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """A number for each beginning of each prompt, of one block, two, and so on; equal beginnings have equal numbers."""
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    found = []
    for prompt in prompts:
        numbers, last = [], 0
        for end in range(SHARED, len(prompt) + 1, SHARED):
            last = known.setdefault((last, tuple(prompt[end - SHARED : end])), len(known) + 1)
            numbers.append(last)
        found.append(numbers)
    return found


def shared_tokens(prompts: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens at the start of each prompt an earlier one had too; at least one is always left to compute."""
    seen: set[int] = set()
    shared = []
    for prompt, numbers in zip(prompts, beginnings(prompts), strict=True):
        shared.append(min(SHARED * sum(number in seen for number in numbers), len(prompt) - 1))
        seen.update(numbers)
    return shared


def saved_tokens(prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> int:
    """How many tokens fewer the decode steps read in all, where a block that several rows share is read once a step."""
    steps: dict[int, list[int]] = {}
    for numbers, output in zip(beginnings(prompts), outputs, strict=True):
        for number in numbers:
            steps.setdefault(number, []).append(output - 1)
    return SHARED * sum(sum(rows) - max(rows) for rows in steps.values())


def floor_of(spec: ModelSpec, prompts: Sequence[Sequence[int]], outputs: Sequence[int], rates: Rates = H200) -> Floor:
    """The floor of a batch.

    Args:
        prompts: token ids of each request, in the order of arrival.
        outputs: how many tokens each generates.
    """
    costs = Costs.of(spec)
    lengths = [len(prompt) for prompt in prompts]
    return Floor(
        prefill_seconds(costs, list(zip(shared_tokens(prompts), lengths, strict=True)), rates),
        decode_seconds(costs, list(zip(lengths, outputs, strict=True)), rates, saved_tokens(prompts, outputs)),
    )
