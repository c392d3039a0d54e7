"""A model before anything heavy is loaded: its local files, its spec, its end-of-sequence ids. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wavecore.engine_core.api.gguf_file import GgufFile, read_gguf
from wavecore.engine_core.models import families, files, gguf
from wavecore.engine_core.models.files import Progress
from wavecore.engine_core.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files, read as far as their headers.

    Attributes:
        path: the folder or the `.gguf` file.
        gguf: the header of the latter, else None.
    """

    path: Path
    spec: ModelSpec
    eos_token_ids: tuple[int, ...]
    gguf: GgufFile | None = None


def open_model(model: str, progress: Progress) -> ModelSource:
    """Resolve a model's name and read what it is.

    Raises:
        ModelError, NotSupportedError: naming the file, and the way out.
    """
    path = files.resolve_model(model, progress)
    if path.is_file():
        file = read_gguf(path)
        spec, eos = gguf.from_gguf(file), gguf.eos_token_ids(file)
    else:
        file, config = None, files.read_config(path)
        spec, eos = families.from_config(config, path / "config.json"), files.eos_token_ids(path, config)
    return ModelSource(path, spec, tuple(i for i in eos if i < spec.vocab_size), file)
