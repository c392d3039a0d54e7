"""Pipelines of real models on a GPU, which they share."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests.support.checkpoints import make_config, save_model
from tests.support.tokenizers_for_tests import write_folder

from wavecore import ConfigError, ModelPipeline, SamplingParams, connect
from wavecore.testing import gpus
from wavecore.transport.processes.deployment import read

SHARED = {"gpu_memory_utilization": 0.4, "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two tiny models of different families, with a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = str(write_folder(folder / "tokenizer"))
    names = ("Llama", "Qwen3")
    return [
        {"model": save_model(folder / name, make_config(name, vocab_size=512)), "tokenizer": tokenizer}
        for name in names
    ]


def answers(pipeline: ModelPipeline) -> list[list[int]]:
    """Of both stages in one run, which are those of two calls."""
    outputs = pipeline.run("the sea")
    assert pipeline.runtime_dir
    with connect(pipeline.runtime_dir, stage="rewrite") as llm:
        [alone] = llm.generate(f"Better: {outputs['draft'].text}", GREEDY, use_tqdm=False)
    assert outputs["rewrite"].token_ids == alone.outputs[0].token_ids
    return [output.token_ids for output in outputs.values()]


def make(models: list[dict[str, Any]], first: int, second: int, **settings: Any) -> ModelPipeline:
    pipeline = ModelPipeline()
    for name, gpu, model, prompt in (
        ("draft", first, models[0], None),
        ("rewrite", second, models[1], "Better: {draft}"),
    ):
        pipeline.add_stage(name, gpus=[gpu], prompt=prompt, sampling_params=GREEDY, **model, **settings)
    return pipeline


@pytest.mark.timeout(400)
def test_stages_share_one_gpu(models: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    """They start at the same time, and each gets the share that it has alone."""
    with pytest.raises(ConfigError, match=r"0\.9 \(draft\) \+ 0\.9 \(rewrite\)"):
        make(models, 0, 0).__enter__()
    total = torch.cuda.mem_get_info()[1]
    with make(models, 0, 0, **SHARED) as pipeline:
        assert [len(ids) for ids in answers(pipeline)] == [8, 8]
        assert pipeline.runtime_dir
        assert len({rank.device for engine in read(pipeline.runtime_dir).engines for rank in engine.ranks}) == 1
        used = total - torch.cuda.mem_get_info()[0]
        for name in ("draft", "rewrite"):
            with connect(pipeline.runtime_dir, stage=name) as llm:
                llm.print_memory_stats()
        assert capsys.readouterr().out.count("\n  host kv cache") == 2
    assert used < 0.85 * total or "PYTEST_XDIST_WORKER" in os.environ  # both shares, and contexts; others' tests


@pytest.mark.timeout(400)
def test_a_gpu_for_each_stage(models: list[dict[str, Any]]) -> None:
    gpus(2)
    with make(models, 0, 0, **SHARED) as pipeline:
        expected = answers(pipeline)
    with make(models, 1, 0, num_gpu_blocks_override=64) as pipeline:
        assert answers(pipeline) == expected
        assert pipeline.runtime_dir
        devices = [rank.device for engine in read(pipeline.runtime_dir).engines for rank in engine.ranks]
        assert len(set(devices)) == 2
