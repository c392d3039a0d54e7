"""Experts over two "hosts", a GPU each: NCCL's ranks meet over the vote link."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.multi_gpu.test_waves import EXPERTS
from tests.multi_gpu.wave_rank import ASKED, GREEDY, SETTINGS
from tests.support.checkpoints import assert_greedy, load_reference, make_config, save_model
from tests.support.lockstep_hosts import hosts_in_lockstep

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
