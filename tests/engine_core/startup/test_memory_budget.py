"""Bytes of a GPU by use: what is left for the KV cache, and what a share must be for so much of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from wavecore.engine_core.startup.memory_budget import (
    GIB,
    SMALLER_STEPS,
    KVCacheNeed,
    MemoryBudget,
    no_room,
    refused,
    would_fit,
)
from wavecore.transport.errors import ConfigError, ResourceError

MIB = 1 << 20
budgets = st.builds(
    MemoryBudget,
    total=st.integers(8 * GIB, 200 * GIB),
    utilization=st.integers(1, 100).map(lambda n: n / 100),
    weights=st.integers(0, 60 * GIB),
    tables=st.integers(0, 4 * GIB),
    activations=st.integers(0, 8 * GIB),
    graphs=st.integers(0, GIB),
    others=st.integers(0, 100 * GIB),
)


@given(budgets, st.integers(0, 60 * GIB))
@example(MemoryBudget(100 * GIB, 0.5, 90 * GIB, 0, 0, 0, 0), 10 * GIB)  # the whole device
def test_a_suggested_share_fits_and_is_suggested_whenever_one_fits(budget: MemoryBudget, need: int) -> None:
    def room(hundredths: int) -> int:
        return replace(budget, utilization=hundredths / 100).kv_cache

    fitting = [n for n in range(1, 101) if room(n) >= need]
    suggested = budget.fitting_utilization(need)
    if suggested is None:
        assert not fitting or need == 0
    else:
        assert replace(budget, utilization=suggested).kv_cache >= need
        assert round(100 * suggested) == fitting[0] or need == 0


@given(budgets)
def test_no_share_takes_what_others_hold_and_two_shares_do_not_add_up_to_more(budget: MemoryBudget) -> None:
    own = budget.weights + budget.tables + budget.activations + budget.graphs
    if budget.kv_cache > 0:
        assert own + budget.kv_cache <= budget.total * budget.utilization
        assert own + budget.kv_cache + budget.others <= budget.total
    assert budget.kv_cache >= replace(budget, others=budget.others + GIB).kv_cache


def test_two_engines_of_one_gpu_have_a_share_each() -> None:
    """The second finds the first's memory taken, and its own share whole."""
    sizes = {"total": 139.8, "weights": 15, "tables": 0, "activations": 2.3, "graphs": 0, "others": 0.6}
    first = MemoryBudget(utilization=0.45, **{name: int(size * GIB) for name, size in sizes.items()})
    own = 15 + 2.3 + first.kv_cache / GIB
    assert own == pytest.approx(0.45 * 139.8)
    second = replace(first, others=int((0.6 + 0.6 + own) * GIB))
    assert second.kv_cache == first.kv_cache


@given(budgets, st.integers(1 << 10, 1 << 26))
def test_smaller_steps_help_only_where_the_weights_leave_room(budget: MemoryBudget, block_bytes: int) -> None:
    need = KVCacheNeed(block_size=16, block_bytes=block_bytes, least=513, longer_tables=0)
    beside = budget.total - budget.others - budget.weights
    if budget.advice_on_steps(need):
        assert beside > 2 * block_bytes
    elif budget.activations >= 384 * MIB:  # steps that are measured take no less
        assert budget.kv_cache < 2 * block_bytes


def test_the_table() -> None:
    budget = MemoryBudget(80 * GIB, 0.9, 16 * GIB, 2 * GIB, 4 * GIB, GIB, GIB // 2)
    assert budget.kv_cache == 49 * GIB
    lines = budget.table(num_blocks=1000, block_bytes=32 * MIB).splitlines()
    assert lines[0] == "GPU memory, gpu_memory_utilization 0.9"
    rows = [line.split(" GiB  ") for line in lines[1:]]
    assert [float(size) for size, _ in rows] == [16, 2, 4, 1, 31.25, 0.5, 25.25, 80]
    names = ["weights", "tables", "activations", "graphs", "KV cache, 1000 blocks", "others", "left free", "total"]
    assert all(name.startswith(start) for (_, name), start in zip(rows, names, strict=True))


def test_a_refusal_says_what_helps() -> None:
    error = no_room("it is large", would_fit(["dtype bfloat16", "max_model_len 8"]), "\nGPU memory")
    assert type(error) is ConfigError
    assert str(error) == "it is large; it would fit with dtype bfloat16, or max_model_len 8\nGPU memory"
    error = no_room("it is large", SMALLER_STEPS)
    assert type(error) is ConfigError
    assert str(error) == "it is large; lower max_num_batched_tokens and max_num_seqs"
    error = no_room("it is large", would_fit([]))
    assert type(error) is ResourceError
    assert str(error).startswith("it is large, and no setting makes room: free what other")


def test_only_a_shortage_of_memory_is_a_refusal() -> None:
    fits = "tables: CUDA out of memory; it would fit with dtype bfloat16$"
    with pytest.raises(ConfigError, match=fits), refused("tables", would_fit(["dtype bfloat16"])):
        raise torch.OutOfMemoryError("CUDA out of memory\nmore lines")
    with pytest.raises(RuntimeError, match="no kernel image"), refused("tables", ""):
        raise RuntimeError("no kernel image")
