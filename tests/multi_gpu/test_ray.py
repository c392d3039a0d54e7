"""Engines in Ray actors give the same tokens as engines in processes, on any devices. Needs Ray, and is slow where it
computes on the CPU; tests/faults/test_ray.py ends them."""

from __future__ import annotations

from importlib.util import find_spec
from ipaddress import ip_address
from math import prod
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.test_lockstep_model import EXPERTS
from tests.support.checkpoints import make_config, prompts, save_model
from tests.support.waiting import two_free_ports, until

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.testing import deployment, gpus
from wavecore.transport.curve import create_keys
from wavecore.transport.processes.deployment import read

pytestmark = [pytest.mark.timeout(240), pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")]
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), "cuda"]
SIZES: dict[str, dict[str, int]] = {"one": {}, "dp": {"data_parallel_size": 2}, "tp": {"tensor_parallel_size": 2}}
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 250, "skip_tokenizer_init": True}
SETTINGS["kv_cache_memory_gib"] = 0.01
ASKED = (
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=7, max_tokens=20, ignore_eos=True),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("ray") / "model", make_config("Qwen3", num_attention_heads=4))


def tokens(llm: LLM) -> list[Any]:
    outputs = [llm.generate(prompts(6), params, use_tqdm=False) for params in ASKED]
    return [output.outputs[0].token_ids for each in outputs for output in each]


def check_listeners(runtime_dir: Path) -> None:
    """Engines listen at the address that Ray knows their node by, and their ranks on its loopback interface."""
    for entry in read(runtime_dir).engines:
        found = [c for rank in entry.ranks if rank.pid for c in psutil.Process(rank.pid).net_connections("inet")]
        listening = {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}
        assert entry.host in listening
        assert all(ip_address(address).is_loopback for address in listening - {entry.host})


def own_address() -> str:
    """That by which Ray knows this host."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_same_tokens(model: Path, sizes: dict[str, int], device: str) -> None:
    if device == "cuda":
        gpus(prod(sizes.values()))  # skips where fewer are visible
    settings = {**SETTINGS, **sizes, "device": device}
    with LLM(model, **settings) as llm:
        right = tokens(llm)
    settings["data_parallel_backend"] = "ray"
    with deployment("wavecore", model, **settings) as (runtime_dir, _), LLM.connect(runtime_dir) as llm:
        assert tokens(llm) == right
        check_listeners(runtime_dir)


@pytest.mark.parametrize("device", DEVICES)
def test_experts_over_two_actors(tmp_path: Path, device: str) -> None:
    """In lockstep, as over hosts: the tokens of one engine."""
    if device == "cuda":
        gpus(2)
    model = save_model(tmp_path / "model", make_config("Qwen3Moe", **EXPERTS))
    create_keys(tmp_path / "keys")
    settings = {**SETTINGS, "device": device, "enforce_eager": True}
    with LLM(model, **settings) as llm:
        right = tokens(llm)
    settings |= {"data_parallel_size": 2, "enable_expert_parallel": True, "data_parallel_backend": "ray"}
    settings |= {"keys": str(tmp_path / "keys"), "data_parallel_address": f"tcp://{own_address()}:{two_free_ports()}"}
    with deployment("wavecore", model, **settings) as (runtime_dir, _), LLM.connect(runtime_dir) as llm:
        until(lambda: len(llm.step_stats()) == 2, "both engines")
        assert tokens(llm) == right
        until(lambda: len({s["steps"] + s["dummy_steps"] for s in llm.step_stats()}) == 1, "equal passes")
        check_listeners(runtime_dir)
