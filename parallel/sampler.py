"""Tokens from logits whose columns lie on the ranks of a group; each rank draws the same ones.

A rank finds the best tokens among its own columns, and only these are gathered. What a token gets as noise depends on
its id, so the draws are those of one rank. Truncation looks at the whole vocabulary: then the logits are gathered, with
what requests change in them done by the rank that has the column. Which of the two, all rows of a step and nothing that
a rank sees decide.
"""

from dataclasses import replace

import torch
from torch import Tensor

from wavecore.kernels import ops
from wavecore.kernels.sampling.rows import SamplingRows, part_size
from wavecore.parallel.collectives import Collective, Collectives
from wavecore.parallel.layers import gathered


def sample(logits: Tensor, rows: SamplingRows, vocab: int, group: Collectives) -> None:
    """Draw a token a row.

    Args:
        logits: [R, columns of this rank], float32, bfloat16 or float16; those in float32 may be changed.
        rows: what is drawn is written there.
        vocab: columns of all ranks, without padding.
    """
    if group.size == 1 or not rows.truncates:
        ops.finish(group.all_gather(ops.draw(logits, rows)), rows)
        return
    none = torch.full_like(rows.count_row, -1)
    done = replace(rows, edits=False, count_row=none, allowed_row=none, first=0)
    ops.finish(ops.draw(gathered(ops.adjust(logits, rows), vocab, group), done)[None], rows)


def collectives(num_rows: int, columns: int, truncates: bool) -> list[Collective]:
    """What `sample` of so many rows does with other ranks."""
    shape = (num_rows, columns) if truncates else (2, num_rows, -(-columns // part_size(num_rows, columns)))
    return [("all_gather", shape, torch.float32)]
