"""Experts, or one engine, over two "hosts", a GPU each: NCCL's ranks meet over the link."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.multi_gpu.test_waves import EXPERTS
from tests.multi_gpu.wave_rank import ASKED, GREEDY, SETTINGS
from tests.support.checkpoints import assert_greedy, load_reference, make_config, save_model
from tests.support.lockstep_hosts import hosts_in_lockstep, one_engine_settings, started
from tests.support.waiting import two_free_ports

from wavecore.engine_core.api.config import EngineConfig
from wavecore.frontend.client.service import make_supervisor
from wavecore.transport.errors import NotSupportedError


def test_experts_over_two_hosts(tmp_path: Path, two_gpus: list[str]) -> None:
    """The right tokens from either host, and sums that wait for each other."""
    assert two_gpus
    model = save_model(tmp_path / "model", make_config("Qwen3Moe", **EXPERTS))
    reference = load_reference(model)
    settings = {**SETTINGS, "model": str(model), "enforce_eager": True}
    settings.pop("data_parallel_size", None)
    with hosts_in_lockstep(tmp_path, [{"device": f"cuda:{rank}"} for rank in range(2)], **settings) as hosts:
        for llm in hosts:
            for output in llm.generate(ASKED, GREEDY, use_tqdm=False):
                assert_greedy(reference, output.prompt_token_ids, output.outputs[0].token_ids, "hosts")


def test_graphs_that_would_hang_are_refused(tmp_path: Path, two_gpus: list[str]) -> None:
    import torch

    from wavecore.parallel.ranks import GRAPHS_OVER_HOSTS

    assert two_gpus
    if torch.cuda.nccl.version() >= GRAPHS_OVER_HOSTS:  # type: ignore[no-untyped-call]
        pytest.skip("this NCCL can")
    settings = {**SETTINGS, "model": str(save_model(tmp_path / "model", make_config("Qwen3Moe", **EXPERTS)))}
    settings.pop("data_parallel_size", None)
    refused = pytest.raises(NotSupportedError, match="enforce_eager")
    with refused, hosts_in_lockstep(tmp_path, [{"device": f"cuda:{rank}"} for rank in range(2)], **settings):
        pass


def test_one_engine_over_two_hosts(tmp_path: Path, two_gpus: list[str]) -> None:
    """The right tokens, with a rank on each "host"; eagerly, or from graphs where NCCL can."""
    import torch

    from wavecore.parallel.ranks import GRAPHS_OVER_HOSTS

    assert two_gpus
    model = save_model(tmp_path / "model", make_config("Qwen3", num_attention_heads=4))
    reference = load_reference(model)
    settings = {**SETTINGS, "model": str(model), "tensor_parallel_size": 2, "check_ranks": True}
    settings |= {"data_parallel_size": 1, "enable_expert_parallel": False}
    settings["enforce_eager"] = torch.cuda.nccl.version() < GRAPHS_OVER_HOSTS  # type: ignore[no-untyped-call]
    own = one_engine_settings(tmp_path, 2, two_free_ports())
    configs = [EngineConfig(**{**settings, **each, "device": f"cuda:{host}"}) for host, each in enumerate(own)]
    with started([make_supervisor(config) for config in configs]) as hosts:
        for llm in hosts:
            for output in llm.generate(ASKED, GREEDY, use_tqdm=False):
                assert_greedy(reference, output.prompt_token_ids, output.outputs[0].token_ids, "hosts")
