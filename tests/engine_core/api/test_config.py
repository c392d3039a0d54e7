"""EngineConfig: every setting has its kind and bounds, and an error that names it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.devices import places
from wavecore.transport.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("max_num_seqs", 0, "a whole number from 1 to 65536, not 0"),
        ("max_num_seqs", True, "a whole number from 1 to 65536, not True"),
        ("max_model_len", 10**12, r"a whole number from 1 to 16777216 \(or None\), not 1000000000000"),
        ("num_gpu_blocks_override", 1, "a whole number from 2 to"),
        ("gpu_memory_utilization", 0.0, "a number above 0 and at most 1, not 0.0"),
        ("gpu_memory_utilization", 1.01, "a number above 0 and at most 1"),
        ("gpu_memory_utilization", math.nan, "a number above 0 and at most 1, not nan"),
        ("kv_cache_memory_gib", 0, "a number above 0, not 0"),
        ("swap_space_gib", -1.0, "a number of at least 0, not -1.0"),
        ("watermark", 1.0, "a number of at least 0 and at most 0.99"),
        ("max_inter_token_ms", 0.0, r"a number above 0 \(or None\), not 0.0"),
        ("ageing_seconds", math.inf, r"a number above 0 and at most 1e\+09, not inf"),
        ("max_queue_seconds", 0.0, r"a number of at least 0.001 and at most 604800 \(or None\), not 0.0"),
        ("max_holding_seconds", 0.0, r"a number above 0 \(or None\), not 0.0"),
        ("scheduling_policy", "lifo", "one of fcfs, priority, hybrid, not 'lifo'"),
        ("dtype", None, "one of auto, float32"),
        ("enable_prefix_caching", 1, "true or false, not 1"),
        ("model", None, "text of at most"),
        ("address", 5, r"text of at most .* \(or None\)"),
        ("custom_ops", {"a": 1}, "a mapping of texts"),
        ("custom_ops", ["a"], "a mapping of texts"),
    ],
)
def test_a_setting_out_of_bounds_is_refused_by_name(name: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be {reason}"):
        EngineConfig(**{name: value})


def test_settings_must_go_together() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens 8 is below max_num_seqs 16"):
        EngineConfig(max_num_batched_tokens=8, max_num_seqs=16)


def test_numbers_become_plain_and_travel_as_json() -> None:
    config = EngineConfig(max_num_seqs=np.int64(8), step_timeout=math.inf, swap_space_gib=4)  # type: ignore[arg-type]
    assert type(config.max_num_seqs) is int and type(config.swap_space_gib) is float
    assert EngineConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("given", "seqs", "tokens"),
    [
        ({"max_num_batched_tokens": 48}, 48, 48),
        ({"max_num_seqs": 9000}, 9000, 9000),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 4}, 4, 4),
        ({}, 256, 8192),
    ],
)
def test_the_default_that_was_not_given_gives_way(given: dict[str, int], seqs: int, tokens: int) -> None:
    config = EngineConfig(**given)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (seqs, tokens)


def test_shared_experts_keep_engines_in_lockstep() -> None:
    assert EngineConfig(enable_expert_parallel=True, data_parallel_size=2).dp_lockstep
    assert not EngineConfig(enable_expert_parallel=True, tensor_parallel_size=2).dp_lockstep
    with pytest.raises(ConfigError, match="dp_lockstep needs a data_parallel_size of 2 to 256"):
        EngineConfig(enable_expert_parallel=True, data_parallel_size=257)


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ({}, range(4)),
        ({"data_parallel_rank": 0}, range(1)),
        ({"data_parallel_rank": 3}, range(3, 4)),
        ({"data_parallel_rank": 1, "data_parallel_size_local": 2}, range(1, 3)),
        ({"data_parallel_size_local": 2}, range(2)),
    ],
)
def test_engines_that_are_started_here(given: dict[str, int], here: range) -> None:
    assert EngineConfig(data_parallel_size=4, **given).engines_here == here


NODES: dict[str, Any] = {"nnodes": 2, "tensor_parallel_size": 4, "data_parallel_rank": 0, "keys": "/keys"}
NODES |= {"address": "tcp://127.0.0.1", "data_parallel_address": "tcp://127.0.0.1:7000"}


def test_ranks_that_are_started_here(tmp_path: Path) -> None:
    assert EngineConfig(tensor_parallel_size=4).ranks_here == range(4)
    hosts = [EngineConfig(data_parallel_size=4, **NODES, node_rank=host) for host in range(2)]
    assert [config.ranks_here for config in hosts] == [range(2), range(2, 4)]
    assert all(config.spans_hosts and [len(ranks) for ranks in places(config, {}, tmp_path)] == [2] for config in hosts)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"data_parallel_rank": 4}, "ask for engines 4 to 4, and data_parallel_size is 4"),
        ({"data_parallel_rank": 3, "data_parallel_size_local": 2}, "ask for engines 3 to 4"),
        ({"data_parallel_rank": 0, "dp_lockstep": True}, "compute together on several hosts need data_parallel_a"),
        ({"data_parallel_rank": 0, "data_parallel_backend": "ray"}, "data_parallel_rank with data_parallel_backend"),
        ({"keys": "/keys"}, "keys /keys: they are for tcp; give address, too"),
        ({"data_parallel_rank": 0, "nnodes": 2, "tensor_parallel_size": 2}, "several hosts need data_parallel_address"),
        ({**NODES, "nnodes": 3}, "nnodes 3: tensor_parallel_size is 4, node_rank 0; hosts have equally many ranks"),
        ({**NODES, "node_rank": 2}, "nnodes 2: tensor_parallel_size is 4, node_rank 2"),
        ({"node_rank": 1}, "nnodes 1: tensor_parallel_size is 1, node_rank 1"),
        (
            {**NODES, "data_parallel_size_local": 2},
            "nnodes 2 is for one engine, .* start each with its data_parallel_r",
        ),
        ({**NODES, "dp_lockstep": True}, "nnodes 2 is for one engine, .* those in lockstep have one host each"),
        ({**NODES, "model": "scripted:"}, "nnodes 2 is for one engine, and not for a scripted one"),
        (
            {**NODES, "address": None, "keys": None, "data_parallel_backend": "ray"},
            "nnodes with data_parallel_backend ray",
        ),
    ],
)
def test_engines_that_cannot_be_started_here(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineConfig(data_parallel_size=4, **given)
