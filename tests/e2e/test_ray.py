"""Programs that start engines in Ray actors, and starts that are refused. Needs Ray. Tokens are compared in
tests/multi_gpu/test_ray.py, and tests/faults/test_ray.py ends engines."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.support.checkpoints import make_config, save_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),
]
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
# Nothing is loaded: the model is nowhere.
REFUSED = """
from wavecore import LLM
from wavecore.engine_core import ray_groups
from wavecore.transport.errors import WavecoreError

def start(**settings):
    try:
        LLM("./none", data_parallel_backend="ray", skip_tokenizer_init=True, device="cpu", **settings)
    except WavecoreError as error:
        print(f"{type(error).__name__}: {error}")

start(ray_address="127.0.0.1:1")
start(data_parallel_size=1000)
ray_groups.VERSION = "9.9"
start()
"""


def said(program: str, folder: Path) -> tuple[list[str], str]:
    """Lines of standard output, and what went to standard error."""
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.splitlines(), done.stderr


def test_one_after_the_other(tmp_path: Path) -> None:
    """LLM and AsyncLLM, each with a private Ray, in one program."""
    save_model(tmp_path / "model", make_config("Qwen3", num_attention_heads=4))
    lines, errors = said(PROGRAM, tmp_path)
    first, *others = [line for line in lines if line.startswith("[")]
    assert others == [first, first], errors


def test_starts_that_are_refused(tmp_path: Path) -> None:
    """Nobody listens at the address; no cluster like this one will ever have the room; a node has another version."""
    lines, errors = said(REFUSED, tmp_path)
    nobody, room, version = (line for line in lines if "Error: " in line)
    assert nobody.startswith("StartError: no Ray at 127.0.0.1:1, waited 20 s at most"), errors
    assert room.startswith("ConfigError: Ray has room for") and "which ask for 1 CPU each" in room
    assert version.startswith("ConfigError: node") and version.endswith("9.9; install the same on all nodes")
