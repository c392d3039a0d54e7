"""What users of vLLM type: it works, or is refused by name with the way out."""

from __future__ import annotations

import pytest

import wavecore
from wavecore import LLM, AsyncLLM, ConfigError, EngineConfig, NotSupportedError
from wavecore.frontend.compat import engine_config


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize("name", ["get_metrics", "is_sleeping", "set_tokenizer", "beam_search"])
def test_methods_are_refused_by_name(kind: type, name: str) -> None:
    with pytest.raises(NotSupportedError, match=name):
        getattr(kind.__new__(kind), name)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("RequestOutputKind", "use OutputKind"),
        ("AsyncEngine", "use AsyncLLM"),
        ("OfflineEngine", "use LLM"),
        ("CustomOp", r"register_op\(NAME, fn\)"),
        ("set_sliding_window", "config.json"),
        ("use_flash_attention", "register_op"),
    ],
)
def test_names_of_a_package_are_refused(name: str, way_out: str) -> None:
    with pytest.raises(NotSupportedError, match=f"{name}: .*{way_out}"):
        getattr(wavecore, name)


@pytest.mark.parametrize("name", ["set_sliding_window", "use_flash_attention"])
def test_methods_of_earlier_systems(name: str) -> None:
    with pytest.raises(NotSupportedError, match=f"{name}: "):
        getattr(LLM.__new__(LLM), name)


def test_settings_of_earlier_systems() -> None:
    assert engine_config({"max_seq_len": 77, "use_flash_attention": True}) == EngineConfig(max_model_len=77)
    nested = {"scheduler": {"policy": "hybrid", "max_seqs": 4}, "memory": {"kv_block_size": 16}}
    assert engine_config(nested) == EngineConfig(scheduling_policy="hybrid", max_num_seqs=4, block_size=16)
    with pytest.raises(NotSupportedError, match=r"use_flash_attention=False: .*register_op"):
        engine_config({"use_flash_attention": False})
    with pytest.raises(NotSupportedError, match="sliding_window=4096: the window is the model's"):
        engine_config({"sliding_window": 4096})
    with pytest.raises(ConfigError, match="max_num_seqs is given twice"):
        engine_config({"max_seqs": 4, "max_num_seqs": 5})


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_from_engine_args(kind: type[LLM] | type[AsyncLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must be an EngineConfig, not dict"):
        kind.from_engine_args({})  # type: ignore[arg-type]
    started: list[EngineConfig] = []
    monkeypatch.setattr(kind, "_start", lambda self, config: started.append(config))
    config = EngineConfig(max_num_seqs=3)
    assert isinstance(kind.from_engine_args(config), kind)
    assert started == [config]
