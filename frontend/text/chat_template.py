"""A model's chat template: messages to the text of a prompt. It runs in a process of its own (`template_process`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wavecore.frontend.text.template_process import MAX_BYTES, PROCESSES
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

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt's text.

        Args:
            variables: what JSON can carry.

        Raises:
            ValidationError: the template refused the messages, failed or took more than a chat template may.
            ModelError: the model's template does not compile.
            ResourceError: no process could be started to run it in.
        """
        kind, reason = "broken", f"it has {len(self.source)} characters; the limit is {MAX_TEMPLATE}"
        if len(self.source) <= MAX_TEMPLATE:
            data = json.dumps(variables)
            if len(data) > MAX_BYTES:
                raise ValidationError("messages", f"hold {len(data)} characters; the limit is {MAX_BYTES}")
            kind, reason = PROCESSES.render(self.source, data)
        if kind == "text":
            return reason
        if kind == "refused":
            raise ValidationError("messages", f"the chat template refused them: {reason}")
        reason = f"the chat template {'does not compile' if kind == 'broken' else 'failed'}: {reason}"
        if not self.origin:
            raise ValidationError("chat_template", reason)
        if kind == "broken":
            raise ModelError(f"{self.origin}: {reason}")
        raise ValidationError("messages", f"{reason} ({self.origin})")
