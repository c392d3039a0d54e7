"""Chat templates of any model, rendered by transformers and by wavecore, over conversations of every kind.

    python scripts/compare_templates.py FOLDER...

Reads *.jinja, and the templates in tokenizer_config.json and chat_template.json. Prints what differs, and ends with
status 1 then. Where transformers refuses a conversation, wavecore has to refuse it with a typed error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from transformers.utils import logging
from transformers.utils.chat_template_utils import render_jinja_template

from wavecore.frontend.text.chat_template import ChatTemplate
from wavecore.frontend.text.messages import ChatOptions
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.transport.errors import WavecoreError

NAMED_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
SYSTEM = {"role": "system", "content": "You answer in short sentences."}
ASK = {"role": "user", "content": "What is the weather in Köln?"}
ANSWER = {"role": "assistant", "content": "Rain."}
CALL = {
    "type": "function",
    "id": "call12345",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}},
}
TEXT_CALL = {"type": "function", "id": "call12345", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": '{"rain": true}'}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "a city"}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The <weather>.", "parameters": PARAMETERS}}
DOCUMENTS = [{"title": "Rain", "text": "It rains."}, {"title": "Sun", "text": "It shines.", "doc_id": 2}]

Case = tuple[list[Any], dict[str, Any]]
# Name -> messages, and what else the call gets
CONVERSATIONS: dict[str, Case] = {
    "one question": ([ASK], {}),
    "answered": ([ASK, ANSWER], {}),
    "generation prompt": ([ASK], {"add_generation_prompt": True}),
    "system": ([SYSTEM, ASK], {"add_generation_prompt": True}),
    "developer": ([{**SYSTEM, "role": "developer"}, ASK], {}),
    "system alone": ([SYSTEM], {}),
    "several turns": ([SYSTEM, ASK, ANSWER, ASK, ANSWER, ASK], {"add_generation_prompt": True}),
    "two questions in a row": ([ASK, ASK], {}),
    "assistant first": ([ANSWER, ASK], {}),
    "space around": ([{"role": "user", "content": "  hi \n\n"}, {"role": "assistant", "content": "\n ok "}], {}),
    "empty content": ([{"role": "user", "content": ""}], {"add_generation_prompt": True}),
    "no content": ([ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT], {"tools": [TOOL]}),
    "absent content": ([ASK, {"role": "assistant", "tool_calls": [CALL]}, RESULT], {"tools": [TOOL]}),
    "tools": ([SYSTEM, ASK], {"tools": [TOOL], "add_generation_prompt": True}),
    "two tools": ([ASK], {"tools": [TOOL, {**TOOL, "extra": [1, 2.5, None, True]}], "add_generation_prompt": True}),
    "no tools": ([ASK], {"tools": []}),
    "tool call": ([ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, ANSWER], {"tools": [TOOL]}),
    "call as text": (
        [ASK, {"role": "assistant", "content": "So", "tool_calls": [TEXT_CALL]}, RESULT],
        {"tools": [TOOL]},
    ),
    "two calls": ([ASK, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, RESULT, RESULT], {}),
    "result without tools": ([ASK, RESULT], {"add_generation_prompt": True}),
    "other roles": ([ASK, {"role": "ipython", "content": "1"}, {"role": "function", "name": "f", "content": "2"}], {}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]}], {}),
    "parts of the system": ([{"role": "system", "content": [{"type": "text", "text": "s"}]}, ASK], {}),
    "reasoning": ([ASK, {**ANSWER, "reasoning_content": "Clouds."}, ASK], {}),
    "reasoning by another name": ([ASK, {**ANSWER, "reasoning": "Clouds."}], {}),
    "thinking": (
        [ASK, {**ANSWER, "thinking": "Clouds."}, ASK],
        {"enable_thinking": False, "add_generation_prompt": True},
    ),
    "thoughts in the content": (
        [ASK, {"role": "assistant", "content": "<think>\nClouds.\n</think>\n\nRain."}, ASK],
        {},
    ),
    "documents": ([ASK], {"documents": DOCUMENTS, "add_generation_prompt": True}),
    "continued": ([ASK, ANSWER], {"continue_final_message": True}),
    "continued behind a space": ([ASK, {"role": "assistant", "content": "It is "}], {"continue_final_message": True}),
    "continued at a sign": ([ASK, {"role": "assistant", "content": "|"}], {"continue_final_message": True}),
    "continued letter": ([ASK, {"role": "assistant", "content": "e"}], {"continue_final_message": True}),
    "continued parts": (
        [ASK, {"role": "assistant", "content": [{"type": "text", "text": "It "}]}],
        {"continue_final_message": True},
    ),
    "continued question": ([{"role": "user", "content": "Tell me <"}], {"continue_final_message": True}),
    "variables": ([ASK], {"date_string": "1 May 2030", "builtin_tools": ["search", "code"], "options": {"a": [1, {}]}}),
    "unusual text": ([{"role": "user", "content": "<b> & \"q\" 'r' \\ \t \u2028 ünï 👩‍👩‍👧 {{ x }} {% y %}"}], {}),
    "named speaker": ([{**ASK, "name": "Ada"}, {**ANSWER, "name": "Bot"}], {}),
}


def by_transformers(source: str, messages: list[Any], options: Mapping[str, Any]) -> str:
    values = {**NAMED_TOKENS, **options}
    [[text], _] = render_jinja_template(conversations=[messages], chat_template=source, **values)
    return str(text)


def by_wavecore(tokenizer: Tokenizer, messages: list[Any], options: Mapping[str, Any]) -> str:
    values = dict(options)
    known = {
        name: values.pop(name)
        for name in ("add_generation_prompt", "continue_final_message", "tools")
        if name in values
    }
    return tokenizer.render_chat(
        messages, ChatOptions(**{"add_generation_prompt": False, **known}, chat_template_kwargs=values)
    )[0]


def differences(source: str) -> Iterator[str]:
    """A line for each conversation that comes out differently."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer = Tokenizer(backend, "compared", ChatTemplate(source, "compared"), NAMED_TOKENS)
    for name, (messages, options) in CONVERSATIONS.items():
        theirs = ours = None
        why = ""
        try:
            theirs = by_transformers(source, messages, options)
        except Exception as error:  # whatever a template raises
            why = f"{error!r:.200}"
        try:
            ours = by_wavecore(tokenizer, messages, options)
        except WavecoreError as error:
            why = why or f"{error!r:.200}"
        if ours != theirs:
            yield f"{name}: transformers {theirs!r}, wavecore {ours!r} {why}"


def templates(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and sources of all templates below a folder."""
    for path in sorted(folder.rglob("*.jinja")):
        yield str(path), path.read_text(encoding="utf-8")
    for path in sorted([*folder.rglob("tokenizer_config.json"), *folder.rglob("chat_template.json")]):
        found = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}
        for name, source in (found if isinstance(found, dict) else {"default": found}).items():
            if isinstance(source, str):
                yield f"{path} ({name})", source


def main(folders: list[str]) -> int:
    if not folders:
        print(__doc__)
        return 2
    logging.set_verbosity_error()
    count = different = 0
    for name, source in (found for folder in folders for found in templates(Path(folder))):
        count += 1
        for line in differences(source):
            different += 1
            print(f"{name}: {line}")
    print(f"{count} templates, {len(CONVERSATIONS)} conversations each: {different} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
