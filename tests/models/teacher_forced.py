"""The logits after every token of given sequences: of our decoder, without a plan, and of transformers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from wavecore.kernels import ops
from wavecore.kernels.batch import BatchBuffers
from wavecore.kernels.examples import step_rows


@torch.inference_mode()
def our_logits(runner: Any, ids: Tensor, chunk: int, first: int = 0) -> Tensor:
    """[rows, length - first, vocab], of the runner's dtype.

    Args:
        runner: a ModelRunner with blocks enough; what its cache holds is lost.
        ids: int [rows, length].
        chunk: tokens of each row in a step: 1 goes through decode attention, more through prefill.
        first: position of the first token whose logits are wanted.
    """
    model, device, size = runner.model, runner.device, runner.info.block_size
    rows, length = ids.shape
    blocks = -(-length // size)
    assert rows * blocks < runner.info.num_blocks
    block_table = (torch.randperm(rows * blocks) + 1).int().view(rows, blocks).to(device)
    token_table = ids.int().to(device)
    buffers = BatchBuffers.allocate(rows * chunk, rows, blocks, device)
    parts = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        step = step_rows([end - start] * rows, [end] * rows, device)
        batch = ops.prepare_batch(step, token_table, block_table, size, buffers)
        x, residual = model.forward(model.embed(batch.token_ids), batch, runner.pages)
        if end > first:
            hidden = model.final(x, residual).view(rows, end - start, -1)[:, max(0, first - start) :]
            parts.append(model.logits(hidden.flatten(0, 1)).view(rows, hidden.shape[1], -1))
    return torch.cat(parts, 1)


@torch.inference_mode()
def their_logits(model: PreTrainedModel, ids: Tensor, first: int = 0, chunk: int = 1 << 30) -> Tensor:
    """The same of a transformers model, row by row; on its device and of its dtype."""
    names = inspect.signature(model.forward).parameters
    rows = []
    for row in ids.to(model.device):
        parts, options = [], {"use_cache": False}
        if chunk < len(row):  # newer versions call the cache another name
            options = {"cache" if "cache" in names else "past_key_values": DynamicCache(config=model.config)}
        for start in range(0, len(row), chunk):
            logits = model(row[None, start : start + chunk], **options).logits[0]
            parts.append(logits[max(0, first - start) :].clone())  # nothing, where all lie before `first`
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def distance(logits: Tensor, exact: Tensor) -> float:
    """Relative to the norm of `exact`, float32 on the same device."""
    return float((logits.float() - exact).norm() / exact.norm())
