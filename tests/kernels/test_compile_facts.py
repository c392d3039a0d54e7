"""What kernels need of a GPU, and how they round, as the compiler sees it on a machine without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.kernels.test_compile import run


@pytest.mark.slow  # that they compile at all, test_compile.py sees
def test_attention_fits_and_sampling_rounds_alike(tmp_path: Path) -> None:
    """The largest blocks fit the shared memory of consumer GPUs. Every kernel of sampling computes penalised logits
    anew, so none may fuse a multiplication and an addition."""
    facts = json.loads(run("compile_facts.py", tmp_path))
    kinds = {"_prefill 256 x 32 torch.bfloat16", "_decode 256 x 32 torch.float32", "_find 256 x 4 torch.bfloat16"}
    assert kinds < facts["shared"].keys()
    assert max(facts["shared"].values()) <= 99 << 10, facts["shared"]
    loose = {name: count for name, count in facts["loose"].items() if name != "_edit"}  # it rounds once and for all
    assert {"_group_peaks", "_threshold", "_collect", "_search", "_narrow", "_search_bracket", "_adjust"} < loose.keys()
    assert loose.pop("_draw") == 2 * 32, "a thread has 32 tokens, each with a bound of noise, which decides nothing"
    assert not any(loose.values()), loose
