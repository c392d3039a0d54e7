"""What a start does first, before it imports anything that takes long."""

from contextlib import AbstractContextManager
from typing import NamedTuple

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.models.files import ModelSource, Progress, open_model
from wavecore.engine_core.models.shard import Shard
from wavecore.engine_core.startup.compilation import KernelCompiler, compiler_beside


class Beginning(NamedTuple):
    """A model whose files are open, and what compiles its kernels meanwhile."""

    source: ModelSource
    compiler: AbstractContextManager[KernelCompiler | None]


def begin(config: EngineConfig, progress: Progress, rank: int) -> Beginning:
    """Open the model's files: what is wrong with them, or with the number of ranks, shows now. Where there is a GPU,
    begin to compile; for the process that does so a small model's start waits.

    Args:
        progress: see `factory.make_runner`.
        rank: of this process among those of its host's group.

    Raises:
        ModelError, ConfigError, NotSupportedError: what does not fit, and the way out.
    """
    source = open_model(config.model, progress, config.tokenizer, config.load_format != "dummy")
    Shard(source.spec, config.tensor_parallel_size, 0, config.expert_ranks)
    return Beginning(source, compiler_beside(config, source.spec, rank))
