"""Real (tiny, random) models in lockstep: the tokens that one engine gives, with dummies beside its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.support.checkpoints import make_config, save_model
from tests.support.waiting import until

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import EngineDead, ModelError
from wavecore.transport.processes import deployment

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_tqdm": True,
    "kv_cache_memory_gib": 0.01,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 30, "num_attention_heads": 8}
PROMPTS = [{"prompt_token_ids": [number + 3, 5, 7]} for number in range(6)]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def answers(llm: LLM) -> list[list[int]]:
    """With all engines busy, and then one."""
    outputs = [*llm.generate(PROMPTS, GREEDY, use_tqdm=False), *llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)]
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more", "together"),
    [
        ("Llama", {}, {"dp_lockstep": True}),
        ("Llama", {}, {"dp_lockstep": True, "tensor_parallel_size": 2}),
        ("Qwen3Moe", EXPERTS, {"enable_expert_parallel": True, "tensor_parallel_size": 2}),
    ],
)
def test_the_same_tokens_as_one_engine(
    tmp_path: Path, family: str, more: dict[str, Any], together: dict[str, Any]
) -> None:
    model = save_model(tmp_path / "model", make_config(family, **more))
    with LLM(model, **SETTINGS) as llm:
        alone = answers(llm)
    with LLM(model, **SETTINGS, data_parallel_size=2, **together) as llm:
        assert answers(llm) == alone
        until(lambda: len({s["steps"] + s["dummy_steps"] for s in llm.step_stats()}) == 1)
        assert sum(stat["dummy_steps"] for stat in llm.step_stats()) >= 20


@pytest.mark.slow
def test_experts_over_two_engines_and_their_new_weights(tmp_path: Path) -> None:
    """As one engine answers with either weights; what does not fit is refused, and a failure ends the group."""
    config = make_config("Qwen3Moe", **EXPERTS)
    one, other = (save_model(tmp_path / str(seed), config, seed=seed) for seed in range(2))
    with LLM(one, **SETTINGS) as llm:
        first = answers(llm)
        llm.update_weights(other)
        second = answers(llm)
    assert first != second
    part = load_file(other / "model.safetensors")
    part.pop("model.norm.weight")
    (tmp_path / "part").mkdir()
    save_file(part, tmp_path / "part" / "model.safetensors")
    with LLM(one, **SETTINGS, data_parallel_size=2, enable_expert_parallel=True) as llm:
        assert answers(llm) == first
        with pytest.raises(ModelError, match=r"model\.norm\.weight"):
            llm.update_weights(tmp_path / "part")
        stream = llm.stream(PROMPTS[0], GREEDY.clone(max_tokens=200))
        begun = len(next(stream).outputs[0].token_ids)
        llm.update_weights(other)
        assert begun + sum(len(delta.outputs[0].token_ids) for delta in stream) == 200
        assert answers(llm) == second
        before = deployment.read(llm.runtime_dir).engines
        llm.pause()
        with pytest.raises(EngineDead, match=r"loaded in part: .*model\.norm\.weight"):
            llm._service.client.call("update_weights", {"folder": str(tmp_path / "part")}, engine=1).result()
        assert answers(llm) == first, "the next life begins with the weights of the start"
        after = deployment.read(llm.runtime_dir).engines
        assert [engine.restarts for engine in after] == [engine.restarts + 1 for engine in before]
