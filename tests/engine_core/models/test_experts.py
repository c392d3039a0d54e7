"""Checkpoints of mixtures of experts that cannot be: told by name and number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.support.checkpoints import make_config, save_model
from tests.support.model_driver import load

from wavecore.engine_core.models.families import from_config
from wavecore.engine_core.models.shard import Shard
from wavecore.transport.errors import ConfigError, ModelError

EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 30}


def spec_of(path: Path, **changes: Any) -> Any:
    config = make_config("Qwen3Moe", **EXPERTS).to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]} | changes
    return from_config(config, path)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", make_config("Qwen3Moe", **EXPERTS))
    [file] = model.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors are missing: model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        load(model)


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", make_config("Qwen3Moe", **EXPERTS))
    config = model / "config.json"
    config.write_text(config.read_text().replace('"num_local_experts": 4', '"num_local_experts": 3'))
    with pytest.raises(ModelError, match=r"experts\.3\.\w+_proj\.weight' has no place"):
        load(model)


def test_more_experts_a_token_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a token goes to 5 of 4 experts"):
        spec_of(tmp_path, num_experts_per_tok=5)


@pytest.mark.parametrize("layers", [5, "all", {"0": 1}])
def test_layers_that_are_no_list(tmp_path: Path, layers: Any) -> None:
    with pytest.raises(ModelError, match="mlp_only_layers must be a list"):
        spec_of(tmp_path, mlp_only_layers=layers)


def test_experts_that_do_not_divide_over_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 4: .*width 80 and 30 do not divide .* work: 1, 2$"):
        Shard(spec_of(tmp_path, num_attention_heads=8, num_key_value_heads=4, intermediate_size=80), 4)


def test_a_model_without_experts_has_plain_layers(tmp_path: Path) -> None:
    """As the config of a family with experts may say."""
    assert not spec_of(tmp_path, num_local_experts=0).moe_layers
    assert spec_of(tmp_path, mlp_only_layers=[0], decoder_sparse_step=1).moe_layers == {1, 2}
    assert spec_of(tmp_path, decoder_sparse_step=2).moe_layers == {1}
