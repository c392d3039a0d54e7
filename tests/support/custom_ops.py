"""Functions that a user might register in place of kernels."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from wavecore.kernels import ops
from wavecore.kernels.reference import layers, sampling
from wavecore.kernels.sampling.rows import SamplingRows

calls = 0


def silu_mul(gate_up: Tensor) -> Tensor:
    global calls
    calls += 1
    return layers.silu_mul(gate_up)


def doubled(gate_up: Tensor) -> Tensor:
    return 2 * layers.silu_mul(gate_up)


def careless(gate_up: Tensor) -> Tensor:
    """Right in float32 alone."""
    return layers.silu_mul(gate_up) if gate_up.dtype == torch.float32 else layers.gelu_tanh_mul(gate_up)


def for_gpus(gate_up: Tensor) -> Tensor:
    raise RuntimeError("not on this device")


def rank_1_is_to_fail() -> bool:
    """On the second rank of an engine, while $FAIL_ON_RANK_1 names a file."""
    return Path(os.environ["FAIL_ON_RANK_1"]).exists() and torch.distributed.get_rank() == 1


def another_token_on_rank_1(best: Tensor, rows: SamplingRows) -> None:
    sampling.finish(best, rows)
    rows.tokens[0] += rank_1_is_to_fail()


def raising_on_rank_1(gate_up: Tensor) -> Tensor:
    """The engine's own function, where it does not raise."""
    if rank_1_is_to_fail():
        raise RuntimeError("this test wants rank 1 to raise")
    own = ops.silu_mul.kernel if gate_up.is_cuda else layers.silu_mul
    return own(gate_up)
