"""A chat template: messages to the text of a prompt, made in the sandbox of `template_sandbox`.

Follows transformers' dialect (`trim_blocks`, `lstrip_blocks`, `break`/`continue`, `{% generation %}`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError

from wavecore.frontend.text.template_sandbox import Meter, Refused, Sandbox
from wavecore.transport.errors import ModelError, ValidationError

MAX_TEMPLATE = 1 << 20  # characters of source


class ChatTemplate:
    """A compiled template.

    Args:
        source: jinja2 text.
        origin: the file it came from, for errors.

    Raises:
        ModelError: the template does not compile.
    """

    def __init__(self, source: str, origin: str) -> None:
        self.origin = origin
        self.source = source
        if len(source) > MAX_TEMPLATE:
            raise ModelError(f"{origin}: the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE}")
        try:
            self._template = Sandbox().guarded(source)
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"{origin}: the chat template does not compile: {error}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt's text.

        Raises:
            ValidationError: the template refused the messages, broke a limit of the sandbox or failed.
        """
        meter = Meter()
        parts: list[str] = []
        try:
            for part in self._template.generate({**variables, **meter.hooks}):
                meter.output(part)
                parts.append(part)
            return "".join(parts)
        except Refused as error:
            raise ValidationError("messages", f"the chat template refused them: {error}") from error
        except Exception as error:  # whatever code in a template may raise
            raise ValidationError("messages", f"the chat template of {self.origin} failed: {error!r:.300}") from error
