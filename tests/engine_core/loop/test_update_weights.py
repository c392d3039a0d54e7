"""Other weights for a model that runs: into the same tensors, between steps, on all ranks or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.checkpoints import make_config, prompts, save_model
from tests.support.model_engine import ModelEngine
from tests.support.thread_engines import thread_engines
from tests.support.thread_ranks import ThreadRanks

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.models import weights
from wavecore.parallel.wave import Wish
from wavecore.transport.errors import EngineDead, ModelError, ValidationError

CONFIG: dict[str, Any] = {"num_attention_heads": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ASKED = prompts(3, seed=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one architecture."""
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / str(seed), make_config("Mixtral", **CONFIG), seed=seed) for seed in range(2)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_new_weights_and_their_tokens(folders: list[Path], ranks: int) -> None:
    """Though the same prefixes were cached; and in the tensors that were there, whose addresses graphs hold."""
    one, other = folders
    engine, right = ModelEngine(one, ranks), ModelEngine(other).generate(ASKED, GREEDY)
    before = engine.generate(ASKED, GREEDY)
    runners = engine.runner.ranks if isinstance(engine.runner, ThreadRanks) else [engine.runner]
    places = [[tensor.data_ptr() for tensor in runner.model.tensors()] for runner in runners]
    engine.core.utilities.call("check_weights", {"folder": str(other)})
    engine.core.utilities.call("update_weights", {"folder": str(other)})
    assert engine.generate(ASKED, GREEDY) == right != before
    assert [[tensor.data_ptr() for tensor in runner.model.tensors()] for runner in runners] == places
    if isinstance(engine.runner, ThreadRanks):
        engine.runner.close()


def test_steps_in_flight_end_with_the_old_weights(folders: list[Path]) -> None:
    engine = ModelEngine(folders[0])
    engine.add(ASKED[0], GREEDY)
    for _ in range(3):
        engine.step()
    assert engine.core.in_flight
    engine.core.update_weights(str(folders[1]))
    assert not engine.core.in_flight
    assert [len(output.tokens) for output in engine.run().values()] == [8]


def test_a_folder_that_does_not_fit_is_refused_with_names(folders: list[Path], tmp_path: Path) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    engine = ModelEngine(folders[0])
    with pytest.raises(ModelError, match=r"1 tensors are missing: model\.layers\.1\.self_attn\.o_proj\.weight"):
        engine.core.utilities.call("check_weights", {"folder": str(tmp_path)})
    with pytest.raises(ModelError, match="nothing here"):
        engine.core.utilities.call("check_weights", {"folder": str(tmp_path / "nothing here")})
    assert engine.generate(ASKED, GREEDY) == ModelEngine(folders[0]).generate(ASKED, GREEDY)


def test_a_failure_half_way_is_the_end(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, copied = ModelEngine(folders[0]), list[object]()

    def fails(*_: object) -> None:
        copied.append(None)
        if len(copied) == 9:
            raise OSError("no more blocks on this disk")

    monkeypatch.setattr(weights, "_copy", fails)
    with pytest.raises(EngineDead, match=r"loaded in part: .*no more blocks on this disk"):
        engine.core.update_weights(str(folders[1]))


def test_engines_in_lockstep_change_weights_in_a_pause(folders: list[Path]) -> None:
    right = ModelEngine(folders[1]).generate(ASKED, GREEDY)
    with thread_engines(folders[0], 2, 1) as spread:
        engines = spread.engines
        engines[0].add(ASKED[0], GREEDY)
        with pytest.raises(ValidationError, match="needs a pause"):
            engines[0].core.update_weights(str(folders[1]))
        spread.run()
        for wish in (Wish.PAUSE, Wish.RESUME):
            engines[1].core.wave.ask(wish)
            spread.run()
            if wish == Wish.PAUSE:
                for engine in engines:
                    engine.core.update_weights(str(folders[1]))
        handles = [engines[1].add(prompt, GREEDY) for prompt in ASKED]
        spread.run()
        assert [engines[1].outputs[handle].tokens for handle in handles] == right
        assert not any(torch.isnan(runner.kv_cache).any() for [runner] in spread.runners)
