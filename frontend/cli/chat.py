"""`wavecore chat [MODEL]`: a conversation in the terminal, with history."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from wavecore.frontend.cli.generate import add_input, chat_prompt, open_llm, sampling, stream_answer, system_message
from wavecore.frontend.cli.parser import CommandParser, add_sampling
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import EngineDead, NotSupportedError, WavecoreError

HELP = "/reset forgets the conversation, /quit or Ctrl-D ends; Ctrl-C ends an answer."


def run(args: Sequence[str]) -> int:
    parser = CommandParser("wavecore chat", "[MODEL]", f"Talks to the model. {HELP}", words=["model"])
    add_input(parser)
    add_sampling(parser, max_tokens=1024)
    values = parser.parse(args)
    sampling(values)  # a bad value is told before an engine is started
    with open_llm(values) as llm:
        if llm.get_tokenizer().chat_template is None:
            raise NotSupportedError("this model has no chat template; use `wavecore generate --raw PROMPT`")
        print(HELP, file=sys.stderr)
        history: list[dict[str, Any]] = system_message(values)
        while (line := _ask()) is not None:
            if line in ("/quit", "/exit"):
                break
            if line == "/reset":
                history = system_message(values)
            elif line:
                history = _turn(llm, history, line, values)
    return 0


def _turn(llm: LLM, history: list[dict[str, Any]], line: str, values: Namespace) -> list[dict[str, Any]]:
    """The conversation with this line and its answer; as it was where there is no answer."""
    asked = [*history, {"role": "user", "content": line}]
    try:
        answer = stream_answer(llm, chat_prompt(llm, asked), sampling(values))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return history
    except WavecoreError as error:  # too long a conversation, say: the next line may do better
        dead = isinstance(error, EngineDead)
        if dead and not llm.has_engine():
            raise
        print(f"\n{error}; {'it is being restarted, ask again' if dead else HELP}", file=sys.stderr)
        return history
    return [*asked, {"role": "assistant", "content": answer}]


def _ask() -> str | None:
    """A line of the user's, None at the end of input or at Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
