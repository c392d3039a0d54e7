"""Every family in 16 bits: its logits are as close to transformers in float32 as those of transformers in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.engine_core.models.test_equality_families import CASES, make
from tests.gpu.teacher_forced import distance, our_logits, their_logits
from tests.support.checkpoints import VOCAB, load_reference
from tests.support.model_driver import load

ROWS, LENGTH = 4, 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_family(tmp_path: Path, case: str, dtype: str) -> None:
    folder = make(tmp_path / "model", case)
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    exact = their_logits(load_reference(folder), ids)
    kind = getattr(torch, dtype)
    theirs = distance(their_logits(load_reference(folder, kind).to("cuda"), ids).cpu(), exact)
    runner = load(folder, device="cuda", dtype=dtype, block_size=16)
    for chunk in (LENGTH, 7, 1):
        ours = distance(our_logits(runner, ids, chunk).cpu(), exact)
        assert ours <= 1.5 * theirs + 0.1 * torch.finfo(kind).eps, (chunk, ours, theirs)
