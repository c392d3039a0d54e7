"""What users of vLLM type: it works, or is refused by name with the way out."""

from __future__ import annotations

import pytest

import wavecore
from wavecore import LLM, AsyncLLM, ConfigError, EngineConfig, NotSupportedError


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize("name", ["get_metrics", "is_sleeping", "set_tokenizer", "beam_search"])
def test_methods_are_refused_by_name(kind: type, name: str) -> None:
    with pytest.raises(NotSupportedError, match=name):
        getattr(kind.__new__(kind), name)


def test_classes_are_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match="RequestOutputKind: use OutputKind"):
        _ = wavecore.RequestOutputKind


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_from_engine_args(kind: type[LLM] | type[AsyncLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must be an EngineConfig, not dict"):
        kind.from_engine_args({})  # type: ignore[arg-type]
    started: list[EngineConfig] = []
    monkeypatch.setattr(kind, "_start", lambda self, config: started.append(config))
    config = EngineConfig(max_num_seqs=3)
    assert isinstance(kind.from_engine_args(config), kind)
    assert started == [config]
