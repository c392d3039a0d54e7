"""The logits after every token of given sequences: of our runner and of transformers."""

from __future__ import annotations

import inspect
from typing import Any
from unittest.mock import patch

import torch
from tests.support.model_driver import ModelDriver
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from wavecore.engine_core.execution.step_shape import Bucket, StepShape


def our_logits(runner: Any, ids: Tensor, chunk: int, first: int = 0) -> Tensor:
    """[rows, length - first, vocab], of the runner's dtype, from steps that the runner launches.

    Args:
        runner: a ModelRunner with blocks enough; what its cache holds is lost.
        ids: int [rows, length].
        chunk: tokens of each row in a step: 1 goes through decode attention, more through prefill.
        first: position of the first token whose logits are wanted.
    """
    forward, model, parts = runner.forward, runner.model, []
    count, length = ids.shape
    starts = iter(range(0, length, chunk))

    def noted(bucket: Bucket, embeds_of: StepShape | None = None) -> Any:
        x, residual = forward(bucket, embeds_of)
        start = next(starts)
        end = min(start + chunk, length)
        if end > first:
            live = count * (end - start)  # padding comes behind
            hidden = model.final(x[:live], residual[:live]).view(count, end - start, -1)[:, max(0, first - start) :]
            parts.append(model.logits(hidden.flatten(0, 1)).view(count, hidden.shape[1], -1))
        return x, residual

    driver = ModelDriver(runner)
    with patch.object(runner, "forward", noted), patch.object(runner.graphs, "most", 0):
        driver.run([driver.add(row, 1, slot) for slot, row in enumerate(ids.tolist())], chunk)
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
