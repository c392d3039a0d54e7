"""Random checkpoints: files that the engine and transformers read, of the sizes that the real models have."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from make_checkpoint import CONFIGS, make
from safetensors.torch import load_file
from tests.support.checkpoints import assert_greedy, load_reference
from tests.support.model_driver import ModelDriver, load

from wavecore.engine_core.models.families import from_config
from wavecore.engine_core.models.weights import parts_of


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All of them, through the index."""
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(places.values())}
    assert places == {tensor: name for name, values in files.items() for tensor in values}
    return {tensor: value for values in files.values() for tensor, value in values.items()}


def test_engine_and_transformers_read_it_alike(tmp_path: Path) -> None:
    make("tiny", tmp_path, "float32")
    driver = ModelDriver(load(tmp_path))
    prompt = list(range(100, 120))
    [ours] = driver.run([driver.add(prompt, 8, 0)])
    assert len(set(ours)) > 1
    assert_greedy(load_reference(tmp_path), prompt, ours)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values(tmp_path: Path, dtype: str) -> None:
    size = make("tiny", tmp_path, dtype)
    values = tensors(tmp_path)
    assert size == sum(value.nbytes for value in values.values())
    for name, value in values.items():
        assert value.dtype == getattr(torch, dtype)
        if name.endswith("norm.weight"):
            assert (value == 1).all()
        else:
            assert value.float().std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(value.float().mean().item()) < 0.002, name
    matrices = [value.flatten()[:100] for value in values.values() if value.dim() == 2]
    assert len({tuple(value.tolist()) for value in matrices}) == len(matrices), "two tensors are equal"


def test_a_seed_names_the_values_however_they_are_cut_into_files(tmp_path: Path) -> None:
    make("tiny", tmp_path / "one", seed=1)
    make("tiny", tmp_path / "cut", seed=1, shard_bytes=20_000)
    make("tiny", tmp_path / "other", seed=2)
    one, cut, other = (tensors(tmp_path / name) for name in ("one", "cut", "other"))
    assert all(torch.equal(one[name], cut[name]) for name in one | cut)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    files = list((tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 3
    for path in files:
        values = load_file(path)
        assert len(values) == 1 or sum(value.nbytes for value in values.values()) <= 20_000


@pytest.mark.parametrize(("name", "parameters"), [("qwen3-0.6b", 596_049_920), ("llama-3.1-8b", 8_030_261_248)])
def test_real_shapes_have_the_real_number_of_parameters(name: str, parameters: int) -> None:
    parts = parts_of(from_config(CONFIGS[name], Path("config.json")), "hf")
    assert sum(math.prod(part.shape) for part in parts.values()) == parameters
