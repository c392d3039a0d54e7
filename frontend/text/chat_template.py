"""A model's chat template: messages to the text of a prompt. It runs in a process of its own (`template_process`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from wavecore.frontend.text.template_process import TemplateProcesses
from wavecore.transport.errors import ModelError, ValidationError

MAX_TEMPLATE = 1 << 20  # characters of source


@dataclass(frozen=True)
class ChatTemplate:
    """A template; it is compiled when it is first used.

    Attributes:
        source: jinja2 text; empty where a model has only templates with names.
        origin: the file it came from, for errors; empty when it came with a request, whose fault all faults are then.
        named: the sources of a model's other templates, by name.
    """

    source: str
    origin: str = ""
    named: Mapping[str, str] = field(default_factory=dict)

    def choose(self, name: str | None, tools: bool) -> ChatTemplate:
        """The template of a name; without one the one for tools, if they are given and there is one, or the default.

        Raises:
            ValidationError: no such template.
        """
        name = name or ("tool_use" if tools and "tool_use" in self.named else "default")
        templates = {"default": self.source, **self.named}
        if not templates.get(name):
            reason = f"{name!r:.80} is neither jinja2 text nor one of the model's templates: {', '.join(templates)}"
            raise ValidationError("chat_template", reason)
        return ChatTemplate(templates[name], self.origin)

    def render(self, processes: TemplateProcesses, special: Sequence[str], conversation: str) -> list[str]:
        """The prompt's text, cut where a special token would form that neither the template nor the model wrote.

        Args:
            special: the texts of special tokens.
            conversation: as JSON, what `template_child` takes.

        Raises:
            ValidationError: the template refused the messages, failed or took more than a chat template may.
            ModelError: the model's template does not compile.
            ResourceError: no process could be started to run it in.
        """
        kind, answer = "broken", f"it has {len(self.source)} characters; the limit is {MAX_TEMPLATE}"
        if len(self.source) <= MAX_TEMPLATE:
            kind, answer = processes.ask(_in_json(self.source, *special), conversation)
        if kind == "text":
            return list(answer)
        if kind == "invalid":
            raise ValidationError("messages", answer)
        reason = f"the chat template {'does not compile' if kind == 'broken' else 'failed'}: {answer}"
        if not self.origin:
            raise ValidationError("chat_template", reason)
        if kind == "broken":
            raise ModelError(f"{self.origin}: {reason}")
        raise ValidationError("messages", f"{reason} ({self.origin})")


@lru_cache(4)
def _in_json(source: str, *special: str) -> str:
    """What a template's process is told once: kept, as a process is found by it."""
    return json.dumps([source, special])
