"""The runner on CUDA in float32: the tokens of transformers, for every family and shape of head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engine_core.models.test_equality_families import CASES, make
from tests.gpu.scenarios import launch_ahead, sleep
from tests.gpu.steps import recorded
from tests.support.checkpoints import assert_greedy, load_reference, make_config, prompts, save_model
from tests.support.model_driver import ModelDriver, load

from wavecore.engine_core.models import weights
from wavecore.engine_core.models.files import resolve_model
from wavecore.transport.errors import ModelError

LLAMA_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "head_dim 8": {"head_dim": 8},
    "head_dim 96": {"head_dim": 96},
    "head_dim 128, group 8": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
    "head_dim 256": {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 2},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def check_greedy(folder: Path, label: str, **settings: Any) -> None:
    """Whole prompts, chunked prompts and a prefix hit, as on a CPU."""
    model = load_reference(folder)
    asked = prompts(12)
    driver = ModelDriver(load(folder, device="cuda", dtype="float32", block_size=16, **settings))
    whole = driver.run([driver.add(p, 24, i) for i, p in enumerate(asked)])
    for prompt, ours in zip(asked, whole, strict=True):
        assert_greedy(model, prompt, ours, label)
    chunked = driver.run([driver.add(p, 24, 31 - i) for i, p in enumerate(asked)], chunk=7)
    for prompt, ours in zip(asked, chunked, strict=True):
        assert_greedy(model, prompt, ours, f"{label}, in chunks")
    first = driver.add(asked[0] * 2, 4, 0)
    driver.run([first])
    shared = driver.add(first.tokens, 12, 1)
    hits = (len(first.tokens) - 1) // 16
    shared.blocks, shared.computed = first.blocks[:hits], hits * 16
    assert_greedy(model, first.tokens, driver.run([shared])[0], f"{label}, prefix hit")


@pytest.mark.parametrize("case", CASES)
def test_families_equal_to_transformers(tmp_path: Path, case: str) -> None:
    check_greedy(make(tmp_path / "model", case), case)


@pytest.mark.parametrize("shape", LLAMA_SHAPES)
def test_shapes_equal_to_transformers(tmp_path: Path, shape: str) -> None:
    check_greedy(save_model(tmp_path / "model", make_config("Llama", **LLAMA_SHAPES[shape])), shape)


def test_a_head_that_no_kernel_holds_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", make_config("Llama", head_dim=512, num_hidden_layers=1))
    with pytest.raises(ModelError, match=r"head_dim 512 .* up to 256"):
        load(folder, device="cuda", dtype="bfloat16")


def test_two_launches_in_flight(tmp_path: Path) -> None:
    """Launching a step before the last one's tokens have been read, or are there, gives the same tokens."""
    runner: Any = load(
        save_model(tmp_path / "model", make_config("Llama")), device="cuda", dtype="float32", block_size=16
    )
    driver = ModelDriver(runner)
    with recorded(runner) as steps:
        driver.run([driver.add(p, 12, i) for i, p in enumerate(prompts(6))])
    assert len(steps) == 12
    runner.kv_cache.zero_()
    launch_ahead(runner, steps, asleep=True)


def test_a_slot_behind_two_to_the_31_tokens(tmp_path: Path) -> None:
    """The last slot's tokens begin there; what it says is what the first slot says of a small table."""
    folder = save_model(tmp_path / "model", make_config("Llama"))
    runner: Any = load(folder, device="cuda", dtype="float32", block_size=16, max_num_seqs=9)
    driver, asked = ModelDriver(runner), prompts(1)[0]
    whole = driver.run([driver.add(asked, 24, 0)])
    table = torch.zeros(9, 1 << 28, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()  # the upload of a prompt waits for nothing
    runner.state.token_table = runner.state.sampling.token_table = table
    runner.graphs.clear()
    last = driver.add(asked, 24, 8)
    assert driver.run([last]) == whole
    assert table[8, : len(last.tokens)].tolist() == last.tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_pass_through_pinned_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Each tensor takes several, and they wait for their copies, which wait for the device."""
    folder = save_model(tmp_path / "model", make_config("Llama"))
    expected = load(folder, device="cpu", dtype=dtype, block_size=16).model.parameters  # type: ignore[attr-defined]
    monkeypatch.setattr(weights, "PIECE", 4096)
    runner: Any = load(folder, device="cuda:0", dtype=dtype, block_size=16)
    for again in (False, True):
        if again:
            for values in runner.model.parameters.values():
                values.zero_()
            sleep()
            runner.update_weights(str(folder))
        for name, values in runner.model.parameters.items():
            assert torch.equal(values.cpu(), expected[name]), name


def default_model() -> Path:
    """Its file; the test is skipped where that is not here and cannot be fetched, as without a network."""
    try:
        return resolve_model("default")
    except ModelError as error:
        if "could not be fetched" not in str(error):
            raise
        pytest.skip(str(error))


def test_smollm2_answers_as_on_the_cpu() -> None:
    path = default_model()
    folder, name = path.parent, path.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    questions = ("What is the capital of France?", "Why is the sky blue?", "Who wrote Hamlet?")
    asked = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for q in questions
    ]
    outputs = []
    for device in ("cpu", "cuda"):
        driver = ModelDriver(load(path, device=device, dtype="float32", block_size=16, num_gpu_blocks_override=200))
        outputs.append(driver.run([driver.add(p, 32, i) for i, p in enumerate(asked)]))
    assert outputs[0] == outputs[1]
    assert "Paris" in tokenizer.decode(outputs[1][0])
