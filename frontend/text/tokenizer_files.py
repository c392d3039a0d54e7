"""Finds and reads the tokenizer, chat template and generation defaults in a model's files. Runs no code from them."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers

from wavecore.engine_core.api.gguf_file import read_gguf
from wavecore.engine_core.api.model_files import named_path, read_json, read_text, unreadable
from wavecore.engine_core.api.special_tokens import SpecialTokens, read_special_tokens
from wavecore.frontend.text.chat_template import ChatTemplate
from wavecore.frontend.text.gguf_tokenizer import WAY_OUT, named_tokens, tokenizer_from_gguf
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.transport.errors import ModelError

# What is taken of generation_config.json; "max_new_tokens" is SamplingParams' "max_tokens"
GENERATION_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load from a folder in Hugging Face form, a tokenizer.json or a `.gguf` file.

    Raises:
        ModelError: nothing there, or files that cannot be read; the message names the file.
        NotSupportedError: a kind of tokenizer that is not supported.
    """
    path = named_path(path)
    if not path.exists():
        raise ModelError(f"tokenizer {path} does not exist; name a folder, a tokenizer.json or a .gguf file")
    if path.suffix == ".gguf":
        return _from_gguf(path)
    folder = path if path.is_dir() else path.parent
    file = folder / "tokenizer.json" if path.is_dir() else path
    config = read_json(folder / "tokenizer_config.json")
    known = read_special_tokens(folder)
    template = _template(folder, config)
    if not file.exists():
        backend, named = _from_transformers(folder, config)
        return Tokenizer(backend, str(folder), template, named)
    text = read_text(file)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise unreadable(file, error) from error
    _add_tokens(backend, known, folder)
    return Tokenizer(backend, str(file), template, {name: token["content"] for name, token in known.named.items()})


def _add_tokens(backend: tokenizers.Tokenizer, known: SpecialTokens, folder: Path) -> None:
    """Add what tokenizer.json leaves to other files, as transformers does.

    Raises:
        ModelError: a token cannot have the id that its file gives it.
    """
    special = {token["content"] for token in known.named.values()}
    added = [{**t, "special": t.get("special") or t["content"] in special} for _, t in sorted(known.added.items())]
    backend.add_tokens([tokenizers.AddedToken(**token) for token in added])
    for index, token in known.added.items():
        if (found := backend.token_to_id(token["content"])) != index:
            said = f"{token['content']!r:.80} has the id {index} in tokenizer_config.json or added_tokens.json"
            raise ModelError(f"{folder}: {said}, and by tokenizer.json it is {found}; take all files from one source")
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    others = [token for token in (*known.named.values(), *known.extra) if token["content"] not in present]
    backend.add_tokens([tokenizers.AddedToken(**token) for token in others])


def generation_defaults(path: str | Path) -> dict[str, Any]:
    """The sampling defaults that a model's authors recommend (generation_config.json), as SamplingParams' fields."""
    folder = Path(path)
    values = read_json(folder / "generation_config.json") if folder.is_dir() else {}
    found = {name: values[name] for name in GENERATION_DEFAULTS if values.get(name) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found if values.get("do_sample", True) else {**found, "temperature": 0.0}


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_gguf(path).metadata
    backend = tokenizer_from_gguf(str(path), metadata)
    key = "tokenizer.chat_template"
    templates = {"default": metadata.get(key)}
    templates |= {name.removeprefix(f"{key}."): metadata[name] for name in metadata if name.startswith(f"{key}.")}
    return Tokenizer(backend, str(path), _chat_template(templates, path), named_tokens(metadata))


def _from_transformers(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Convert an older form (a SentencePiece or vocab.json + merges.txt) with transformers, which loads torch."""
    if "auto_map" in config:
        raise ModelError(f"{folder}: its tokenizer is code that came with the model (auto_map), which is never run")
    if not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
        raise ModelError(f"{folder} has no tokenizer; {WAY_OUT} or skip_tokenizer_init=True")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        backend = loaded.backend_tokenizer
    except Exception as error:  # whatever a conversion raises
        cause = f"transformers cannot make one: {error!s:.300}"
        if (folder / "tokenizer.model").exists() and not all(map(find_spec, ("sentencepiece", "google"))):
            cause = "its tokenizer.model takes packages that are not there: run `pip install sentencepiece protobuf`"
        way_out = "or save one elsewhere with tokenizer.save_pretrained"
        raise ModelError(f"{folder} holds no tokenizer.json, and {cause}; {way_out}") from error
    assert isinstance(backend, tokenizers.Tokenizer)
    return backend, dict(loaded.special_tokens_map)


def _template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The folder's templates: a file wins over tokenizer_config.json."""
    files = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (file := folder / "chat_template.jinja").exists():
        files["default"] = file
    found = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        found = {t.get("name"): t.get("template") for t in found if isinstance(t, Mapping)}
    named = dict(found) if isinstance(found, Mapping) else {"default": found}
    named |= {name: read_text(path) for name, path in files.items()}
    return _chat_template(named, files.get("default", folder / "tokenizer_config.json"))


def _chat_template(named: Mapping[Any, Any], origin: Path) -> ChatTemplate | None:
    texts = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    return ChatTemplate(texts.pop("default", ""), str(origin), texts) if texts else None
