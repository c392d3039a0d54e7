"""`wavecore chat [MODEL]`: a conversation in the terminal, with history; with an engine, or with a server by HTTP."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from wavecore.frontend.cli.generate import chat_prompt, open_llm, sampling, stream_answer, system_message
from wavecore.frontend.cli.parser import CommandParser
from wavecore.frontend.cli.remote import remote_answer, served_model
from wavecore.transport.errors import EngineDead, NotSupportedError, WavecoreError

Messages = list[dict[str, Any]]
HELP = "/reset forgets the conversation, /quit or Ctrl-D ends; Ctrl-C ends an answer."


def run(args: Sequence[str]) -> int:
    options = ("attach", "server", "sampling", "chat")
    values = CommandParser("wavecore chat", "[MODEL]", f"Talks to the model. {HELP}", ["model"], options).parse(args)
    params = sampling(values)  # a bad value is told before an engine is started
    if values.url:
        _converse(system_message(values), partial(remote_answer, values, served_model(values)), lambda: True)
        return 0
    with open_llm(values) as llm:
        if llm.get_tokenizer().chat_template is None:
            raise NotSupportedError("this model has no chat template; use `wavecore generate --raw PROMPT`")

        def answer(asked: Messages) -> str:
            return stream_answer(llm, chat_prompt(llm, asked), params)

        _converse(system_message(values), answer, llm.has_engine)
    return 0


def _converse(system: Messages, answer: Callable[[Messages], str], may_go_on: Callable[[], bool]) -> None:
    """Ask the user for lines, and print what `answer` makes of each conversation."""
    print(HELP, file=sys.stderr)
    history = system
    while (line := _ask()) is not None:
        if line in ("/quit", "/exit"):
            break
        if line == "/reset":
            history = system
        elif line:
            history = _turn(history, line, answer, may_go_on)


def _turn(history: Messages, line: str, answer: Callable[[Messages], str], may_go_on: Callable[[], bool]) -> Messages:
    """The conversation with this line and its answer; as it was where there is no answer."""
    asked = [*history, {"role": "user", "content": line}]
    try:
        text = answer(asked)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return history
    except WavecoreError as error:  # too long a conversation, say: the next line may do better
        dead = isinstance(error, EngineDead)
        if dead and not may_go_on():
            raise
        print(f"\n{error}; {'it is being restarted, ask again' if dead else HELP}", file=sys.stderr)
        return history
    return [*asked, {"role": "assistant", "content": text}]


def _ask() -> str | None:
    """A line of the user's, None at the end of input or at Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
