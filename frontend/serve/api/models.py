"""What is served, by which version: /v1/models, /version, /load."""

import time

from wavecore.frontend.serve.context import ApiContext
from wavecore.frontend.serve.http.http_call import Answer, HttpCall
from wavecore.transport.version import VERSION

STARTED = int(time.time())


async def models(context: ApiContext, _call: HttpCall) -> Answer:
    return Answer({"object": "list", "data": [_card(context, name) for name in context.models]})


async def model(context: ApiContext, call: HttpCall) -> Answer:
    name = call.scope["path_params"]["model"]
    context.check_model(name)
    return Answer(_card(context, name))


async def version(_context: ApiContext, _call: HttpCall) -> Answer:
    return Answer({"version": VERSION})


async def load(context: ApiContext, _call: HttpCall) -> Answer:
    """`server_load`: requests of this process that have not ended, as vLLM calls it."""
    return Answer({"server_load": context.service.client.num_live})


def _card(context: ApiContext, name: str) -> dict[str, object]:
    names = {"id": name, "object": "model", "created": STARTED, "owned_by": "wavecore"}
    return {**names, "root": context.model, "parent": None, "max_model_len": context.service.max_model_len}
