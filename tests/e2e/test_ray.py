"""Engines in Ray actors give the same tokens as engines in processes. Needs Ray; tests/faults/test_ray.py ends them."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import make_config, prompts, save_model

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.testing import deployment, gpus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),
]
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 250, "skip_tokenizer_init": True}
ASKED = (
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=7, max_tokens=20, ignore_eos=True),
)
# One program, three private Rays one after the other; the model is named as from this folder.
PROGRAM = """
import asyncio
from wavecore import LLM, AsyncLLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
settings = {"skip_tokenizer_init": True, "data_parallel_backend": "ray", "disable_tqdm": True, "device": "cpu"}
settings |= {"kv_cache_memory_gib": 0.01, "max_model_len": 250}
for engines in (1, 2):
    with LLM("./model", data_parallel_size=engines, **settings) as llm:
        print(llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids)

async def main():
    llm = await AsyncLLM.start("./model", **settings)
    print([token async for output in llm.generate([5, 6, 7], params) for token in output.outputs[0].token_ids])
    await asyncio.to_thread(llm.shutdown)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("ray") / "model", make_config("Qwen3", num_attention_heads=4))


def tokens(llm: LLM) -> list[Any]:
    outputs = [llm.generate(prompts(6), params, use_tqdm=False) for params in ASKED]
    return [output.outputs[0].token_ids for each in outputs for output in each]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sizes", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["dp", "tp"])
def test_same_tokens(model: Path, sizes: dict[str, int], device: str) -> None:
    if device == "cuda":
        gpus(2)  # skips where fewer are visible
    settings = {**SETTINGS, **sizes, "device": device, "kv_cache_memory_gib": 0.01}
    with LLM(model, **settings) as llm:
        right = tokens(llm)
    settings["data_parallel_backend"] = "ray"
    with deployment("wavecore", model, **settings) as (runtime_dir, _), LLM.connect(runtime_dir) as llm:
        assert tokens(llm) == right


def test_one_after_the_other(model: Path) -> None:
    """LLM and AsyncLLM, each with a private Ray, in one program."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=model.parent, capture_output=True, text=True, check=False
    )
    first, *others = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert others == [first, first], done.stderr
