"""What a supervisor starts for the engines of one model: a child for each rank, with its settings and its place."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from wavecore.engine_core.api.config import MEMORY_ADVICE, SLOW_START_ADVICE, EngineConfig
from wavecore.engine_core.api.devices import Placement
from wavecore.transport.processes.process import ChildSpec


def groups_of(
    config: EngineConfig, engines: Sequence[Sequence[Placement]], stage: str, numbers: Iterator[int]
) -> list[list[ChildSpec]]:
    """The processes of all engines of one model, by group; of each engine its ranks' places are given."""
    # A custom op's module, or the scripted runner, is imported by the paths of this program.
    besides = config.custom_ops or config.is_scripted
    paths = {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)} if besides else {}

    def spec(index: int, place: Placement) -> ChildSpec:
        config_text, env = replace(config, device=place.device).to_json(), {**paths, **place.env}
        advice = MEMORY_ADVICE, SLOW_START_ADVICE
        name = f"engine {index} (stage {stage})" if stage else f"engine {index}"
        first, what = config.ranks_here.start, (name, "wavecore.engine_core", config_text, env, *advice)
        return ChildSpec(*what, device=place.name, stage=stage, first_rank=first)

    groups = [[spec(index, place) for place in ranks] for ranks, index in zip(engines, numbers, strict=False)]
    if config.dp_lockstep:
        groups = [[replace(each, serves=rank == 0) for ranks in groups for rank, each in enumerate(ranks)]]
    return groups
