"""LLM on a small random Llama with a tokenizer: text, embeddings, prompt embeddings, attention maps, own kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.checkpoints import load_reference, make_config, save_model
from tests.support.tokenizers_for_tests import write_folder

from wavecore import LLM, ConfigError, NotSupportedError, SamplingParams, ValidationError, register_op
from wavecore.engine_core.api import custom_ops

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
KERNEL = """
from pathlib import Path
import torch

def silu_mul(gate_up):
    Path(__file__).with_name("used").touch()
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up

def wrong(gate_up):
    return gate_up
"""


@pytest.fixture(scope="module")
def llama_with_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder, make_config("Llama", vocab_size=512))
    write_folder(folder)
    return folder


@pytest.fixture(scope="module")
def llm(llama_with_text: Path) -> Iterator[LLM]:
    with LLM(llama_with_text, max_num_seqs=8, max_model_len=128, kv_cache_memory_gib=0.01) as llm:
        yield llm


def test_text_and_chat(llm: LLM) -> None:
    [output] = llm.generate("The capital of France is", GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids)
    assert llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_hidden_states(llm: LLM, llama_with_text: Path, pooling: str) -> None:
    ids = [5, 6, 7, 8, 9]
    got = llm.embed(ids, pooling=pooling, use_tqdm=False)[0].outputs.embedding
    model = load_reference(llama_with_text)
    with torch.inference_mode():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
    want = hidden.mean(0) if pooling == "mean" else hidden[-1]
    assert np.allclose(got, torch.nn.functional.normalize(want, dim=0).numpy(), atol=1e-4)


def test_prompt_embeds_stand_in_for_tokens(llm: LLM, llama_with_text: Path) -> None:
    ids = [11, 12, 13, 14]
    table = load_file(llama_with_text / "model.safetensors")["model.embed_tokens.weight"]
    by_ids = llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    for embeds in (table[ids], table[ids].numpy(), table[ids][None]):
        [output] = llm.generate({"prompt_embeds": embeds}, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == by_ids


def test_visualize_attention(llm: LLM, llama_with_text: Path, tmp_path: Path) -> None:
    ids = [5, 6, 7, 8, 9, 10]
    weights = llm.visualize_attention(ids, layer=1, head=0, path=tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    with torch.inference_mode():
        want = load_reference(llama_with_text)(torch.tensor([ids]), output_attentions=True).attentions[1][0, 0]
    assert np.allclose(weights, want.numpy(), atol=1e-4)
    for layer, head in ((99, 0), (0, 99), (-1, 0)):
        with pytest.raises(ValidationError):
            llm.visualize_attention(ids, layer=layer, head=head, path=tmp_path / "map.png")
    with pytest.raises(ValidationError, match="prompt: must be text or token ids"):
        embeds = np.zeros((3, int(llm._service.resolved["hidden_size"])), np.float32)
        llm.visualize_attention({"prompt_embeds": embeds}, layer=0, head=0, path=tmp_path / "map.png")
    longest = [5] * int(llm._service.resolved["max_model_len"])
    assert llm.visualize_attention(longest, 0, 0, tmp_path / "map.png").shape == (len(longest), len(longest))


def test_profile_on_a_cpu(llm: LLM, llama_with_text: Path, tmp_path: Path) -> None:
    """torch's profiler into a folder; without one there is nothing that could listen on a CPU."""
    with pytest.raises(NotSupportedError, match="give torch_profiler_dir=FOLDER at start"):
        llm.start_profile()
    folder = tmp_path / "traces"
    settings = {"max_num_seqs": 8, "max_model_len": 128, "kv_cache_memory_gib": 0.01}
    with LLM(llama_with_text, torch_profiler_dir=str(folder), nvtx=True, **settings) as other:
        with pytest.raises(ValidationError, match=r"start_profile\(\) first"):
            other.stop_profile()
        other.start_profile()
        with pytest.raises(ValidationError, match=r"runs already; stop_profile\(\) first"):
            other.start_profile()
        other.generate([5, 6], GREEDY, use_tqdm=False)
        other.stop_profile()
    [trace] = folder.glob("*.pt.trace.json")
    assert "aten::" in trace.read_text()


def test_memory_table(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.print_memory_stats()
    text = capsys.readouterr().out
    assert "weights" in text
    assert "kv cache" in text


@pytest.mark.usefixtures("own_ops")
def test_own_kernel_is_checked_and_used_in_the_engine(
    llama_with_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_kernels.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(custom_ops, "registered", {})
    import my_kernels  # type: ignore[import-not-found]

    try:
        with pytest.raises(ConfigError, match="silu_mul"):
            register_op("silu_mul", my_kernels.wrong)
        with pytest.raises(ConfigError, match="there is no operation"):
            register_op("no_such_op", my_kernels.silu_mul)
        with pytest.raises(ConfigError, match="module of its own"):
            register_op("silu_mul", lambda x: x)
        register_op("silu_mul", my_kernels.silu_mul)
        (tmp_path / "used").unlink()
        with LLM(llama_with_text, max_num_seqs=8, max_model_len=128, kv_cache_memory_gib=0.01) as llm:
            llm.generate([5, 6], GREEDY, use_tqdm=False)
        assert (tmp_path / "used").exists()
    finally:
        sys.modules.pop("my_kernels")
