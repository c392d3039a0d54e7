"""Chooses the runner for a model. Imports torch only for a model that needs it."""

from __future__ import annotations

from collections.abc import Callable

from wavecore.engine_core.config import EngineConfig
from wavecore.engine_core.plan import Runner


def make_runner(config: EngineConfig, progress: Callable[[str, float], None]) -> Runner:
    """Load `config.model`.

    Args:
        progress: called as progress(phase, fraction) with phases "fetch", "load", "kv_cache".

    Raises:
        ModelError, ConfigError, NotSupportedError: what does not fit, and the way out.
    """
    if config.model.startswith("scripted:"):
        from wavecore.engine_core.scripted import ScriptedRunner

        return ScriptedRunner(config, progress)
    from wavecore.engine_core.loader import load_runner

    return load_runner(config, progress)
