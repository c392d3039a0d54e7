"""`wavecore chat [MODEL]`: a conversation in the terminal, with history."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from wavecore.frontend.cli_generate import add_input, chat_prompt, open_llm, sampling, stream_answer, system_message
from wavecore.frontend.cli_parser import CommandParser, add_sampling
from wavecore.transport.errors import EngineDead, NotSupportedError, WavecoreError

HELP = "/reset forgets the conversation, /quit or Ctrl-D ends; Ctrl-C ends an answer."


def run(args: Sequence[str]) -> int:
    args = list(args)
    if args and not args[0].startswith("-"):
        args[0] = f"--model={args[0]}"
    parser = CommandParser("chat", "[MODEL]", f"Talks to the model. {HELP}")
    add_input(parser)
    add_sampling(parser, max_tokens=1024)
    values = parser.parse(args)
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
                history.append({"role": "user", "content": line})
                try:
                    answer = stream_answer(llm, chat_prompt(llm, history), sampling(values))
                except KeyboardInterrupt:
                    history.pop()
                    print(file=sys.stderr)
                    continue
                except EngineDead:
                    raise
                except WavecoreError as error:  # too long a conversation, say: the next line may do better
                    history.pop()
                    print(f"{error}; /reset forgets the conversation", file=sys.stderr)
                    continue
                history.append({"role": "assistant", "content": answer.text})
                print(answer.summary, file=sys.stderr)
    return 0


def _ask() -> str | None:
    """A line of the user's, None at the end of input or at Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
