"""What every endpoint of one API process works with."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.mailbox import OutputKind
from wavecore.frontend.client.service import Service
from wavecore.frontend.prompts import Prompt
from wavecore.frontend.serve.admin import Admin
from wavecore.frontend.serve.admission import Admission
from wavecore.frontend.serve.api.schema import OfModel, is_known
from wavecore.frontend.serve.http.access import Access
from wavecore.frontend.serve.http.http_call import HttpCall
from wavecore.frontend.serve.http.refusals import ModelNotFound
from wavecore.frontend.serve.http.stream import Replies, StreamForm, Whole
from wavecore.frontend.serve.metrics import Metrics
from wavecore.frontend.serve.server_config import ServerConfig
from wavecore.frontend.text.messages import ChatOptions

T = TypeVar("T", bound=OfModel)
PROMPTS_A_TURN = 32


class ApiContext:
    """The engines, and the doors to them.

    Attributes:
        models: what the model is called in requests.
        model: the first of these, which answers have.
    """

    def __init__(self, config: ServerConfig, service: Service) -> None:
        self.config = config
        self.service = service
        self.access = Access(config.api_keys)
        self.admission = Admission(service.client)
        self.replies = Replies(service.client, config.write_timeout, self.admission.count_end)
        given = str(service.resolved["model"])
        on_hub = given.count("/") == 1 and given[0] not in "/.~" and ":" not in given
        names = service.resolved.get("served_model_name") or (given if on_hub else Path(given).name)
        self.models: list[str] = [names] if isinstance(names, str) else names
        self.model = self.models[0]
        vllm = config.metrics_compat == "vllm"
        self.admin = Admin(Path(config.runtime_dir or config.attach[0]), config.index)
        self.metrics = Metrics(service.client, self.model, self.admin.number, vllm)

    async def read(self, call: HttpCall, kind: type[T], generates: bool = True) -> T:
        """The body of a request, for the model that is served.

        Args:
            generates: an engine will be asked, which has to be there.

        Raises:
            ValidationError, NotSupportedError: a field of the wrong type, or that would change the answer.
            HTTPException: another model; no engine; what `HttpCall.read` raises.
        """
        if generates:
            self.admission.check()
        body = await call.read(kind, is_known)
        self.check_model(body.model)
        return body

    def check_model(self, name: str | None) -> None:
        """Raises:
        ModelNotFound: the model has another name.
        """
        if name is not None and name not in self.models:
            raise ModelNotFound(HTTPStatus.NOT_FOUND, f"model {name!r:.80} is not served here, but {self.model!r} is")

    async def render(self, messages: Sequence[dict[str, Any]], chat: ChatOptions, options: RequestOptions) -> Prompt:
        """A conversation as a prompt."""
        chat = chat if self.config.chat_template is None else replace(chat, chat_template=self.config.chat_template)
        return await self.service.beside_loop(partial(self.service.chat_prompt, messages, chat), options)

    async def generate(
        self,
        call: HttpCall,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        options: RequestOptions,
        whole: Whole,
        stream: StreamForm | None = None,
    ) -> None:
        """Send encoded prompts as requests, and write the answer to all of them.

        Raises:
            ValidationError: a value out of bounds; nothing was sent then.
        """
        kind = OutputKind.DELTA if stream else OutputKind.FINAL
        mailboxes = []
        for place, prompt in enumerate(prompts):
            name = f"{call.id}-{place}" if place else call.id
            request = self.service.prepare(prompt, params, options, request_id=name)
            mailboxes.append(self.service.mailbox(request, self.replies.notifier, kind))
            if place % PROMPTS_A_TURN == PROMPTS_A_TURN - 1:
                await asyncio.sleep(0)  # thousands of prompts must not hold up whatever else runs in the loop
        await self.replies.run(call, mailboxes, whole, stream)
