"""GGUF: every supported type equal to transformers' own dequantised load; files that lie are named."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from tests.engine_core.models.gguf_files import VOCAB, write_gguf
from tests.support.checkpoints import assert_greedy, prompts
from tests.support.model_driver import ModelDriver, load

from wavecore.engine_core.api.gguf_file import SUPPORTED, read_gguf
from wavecore.transport.errors import ModelError, NotSupportedError

CASES: list[Any] = [("llama", kind) for kind in SUPPORTED]
SLOW = pytest.mark.slow
CASES += [
    pytest.param(arch, kind, marks=SLOW if kind in ("Q4_0", "Q6_K") else ())
    for arch in ("qwen2", "qwen3")
    for kind in ("F32", "Q4_0", "Q8_0", "Q6_K")
]


@pytest.mark.parametrize(("arch", "kind"), CASES)
def test_equal_to_transformers(tmp_path: Path, arch: str, kind: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", arch, GGMLQuantizationType[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    asked = prompts(6, 30, vocab=VOCAB)
    driver = ModelDriver(load(path))
    outputs = driver.run([driver.add(p, 12, i) for i, p in enumerate(asked)])
    for prompt, ours in zip(asked, outputs, strict=True):
        assert_greedy(model, prompt, ours, f"{arch} {kind}")
    assert len({tuple(o) for o in outputs}) > 3


@pytest.mark.parametrize("how", ["factors", "linear"])
def test_scaled_rotary_frequencies(tmp_path: Path, how: str) -> None:
    """transformers' GGUF load passes over both, so its frequencies are scaled here."""
    factors = np.linspace(1, 8, 32, dtype=np.float32) if how == "factors" else np.full(32, 4, np.float32)
    scaling = {"rope_factors": factors} if how == "factors" else {"linear_scaling": 4.0}
    path = write_gguf(tmp_path / "model.gguf", "llama", GGMLQuantizationType.F32, **scaling)
    plain = write_gguf(tmp_path / "plain.gguf", "llama", GGMLQuantizationType.F32)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=plain.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    driver, prompt = ModelDriver(load(path)), list(range(40, 80))
    assert_greedy(model, prompt, driver.run([driver.add(prompt, 30, 0)])[0])


def test_what_the_header_says(tmp_path: Path) -> None:
    runner = load(write_gguf(tmp_path / "model.gguf", "llama", GGMLQuantizationType.Q8_0))
    assert runner.info.eos_token_ids == (2,)
    assert runner.info.max_model_len == 128
    assert runner.info.vocab_size == VOCAB
    assert runner.info.model_path == str(tmp_path / "model.gguf")


def test_linear_scaling_stretches_the_length(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", GGMLQuantizationType.F32, linear_scaling=4.0)
    assert load(path).info.max_model_len == 512


def test_a_folder_with_one_gguf_file_stands_for_it(tmp_path: Path) -> None:
    """Such folders often have a config.json or a projector for images beside it."""
    path = write_gguf(tmp_path / "model.Q8_0.gguf", "llama", GGMLQuantizationType.Q8_0)
    for name in ("config.json", "mmproj-model.gguf"):
        (tmp_path / name).write_text("{}")
    assert load(tmp_path).info.model_path == str(path)


def test_one_part_of_a_split_file_says_how_to_join_them(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m-00001-of-00003.gguf", "llama", GGMLQuantizationType.F32, split_count=3)
    for given in (path, tmp_path):
        with pytest.raises(NotSupportedError, match=r"m-00001-of-00003\.gguf is one part of 3: join.*--merge"):
            load(given)
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(path.read_bytes())
    with pytest.raises(NotSupportedError, match="one part of 3"):
        load(tmp_path)
    single = write_gguf(tmp_path / "n-00001-of-00001.gguf", "llama", GGMLQuantizationType.F32, split_count=1)
    load(single)


def test_what_is_no_gguf_file_names_the_cause(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for data, match in ((b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"), (b"<html>" * 9, "GGUF")):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=rf"m\.gguf cannot be read.*{match}"):
            load(path)


def test_wrong_rope_settings_name_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", GGMLQuantizationType.F32, linear_scaling=4.0)
    data, key = path.read_bytes(), b"llama.rope.scaling.factor"
    at = data.index(key) + len(key) + 4
    path.write_bytes(data[:at] + struct.pack("<f", 0.0) + data[at + 4 :])
    with pytest.raises(ModelError, match=r"m\.gguf: rope\.scaling\.factor"):
        load(path)


def test_other_architectures_and_types_are_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", "mamba", GGMLQuantizationType.F32)
    with pytest.raises(NotSupportedError, match="mamba"):
        load(path)
    path = write_gguf(tmp_path / "b.gguf", "llama", GGMLQuantizationType.Q8_0)
    data = path.read_bytes()
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    path.write_bytes(data[:at] + struct.pack("<I", GGMLQuantizationType.IQ2_XS) + data[at + 4 :])
    with pytest.raises(NotSupportedError, match=r"token_embd.weight.*IQ2_XS"):
        read_gguf(path)


def test_truncated_anywhere_names_the_file(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", "llama", GGMLQuantizationType.Q4_0).read_bytes()
    cut = tmp_path / "cut.gguf"
    draw = random.Random(0)
    for size in [0, 3, 4, 12, 24, 40, len(whole) - 1, *(draw.randrange(4000) for _ in range(40))]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_gguf(cut)


def test_random_damage_to_the_header_is_an_error_or_a_sound_file(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", "llama", GGMLQuantizationType.Q4_0).read_bytes()
    path = tmp_path / "damaged.gguf"
    draw = random.Random(0)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(3000)] = draw.choice((0, 1, 0x7F, 0xFF, draw.randrange(256)))
        path.write_bytes(data)
        try:
            file = read_gguf(path)
        except (ModelError, NotSupportedError) as error:
            assert "damaged.gguf" in str(error)
        else:
            assert all(t.offset + t.size <= len(data) for t in file.tensors.values())


@pytest.mark.parametrize(
    ("count", "what"),
    [(1 << 60, "entries are announced"), (1 << 20, "entries are announced")],
)
def test_counts_that_lie_cost_nothing(tmp_path: Path, count: int, what: str) -> None:
    path = tmp_path / "lying.gguf"
    for header in ((count, 0), (0, count)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *header) + bytes(64))
        with pytest.raises(ModelError, match=what):
            read_gguf(path)
    array = struct.pack("<Q1sIIQ", 1, b"k", 9, 8, count)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + bytes(64))
    with pytest.raises(ModelError, match=what):
        read_gguf(path)


def test_a_tensor_missing_unknown_or_of_another_shape(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", GGMLQuantizationType.F16)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"))
    with pytest.raises(ModelError, match=r"m\.gguf.*blk\.0\.ffn_xx\.weight"):
        load(path)
    at = data.index(b"llama.feed_forward_length") + len(b"llama.feed_forward_length") + 4
    path.write_bytes(data[:at] + struct.pack("<I", 256) + data[at + 4 :])
    with pytest.raises(ModelError, match=r"m\.gguf.*ffn_gate.*\(512, 256\)"):
        load(path)
