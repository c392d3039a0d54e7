"""Probes: is this process alive, would a request be served, what has been? All but the deep one answer from memory."""

import asyncio
from http import HTTPStatus

import numpy as np
from starlette.exceptions import HTTPException

from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.mailbox import OutputKind
from wavecore.frontend.prompts import Prompt
from wavecore.frontend.serve.context import ApiContext
from wavecore.frontend.serve.http.http_call import Answer, HttpCall
from wavecore.frontend.serve.metrics import CONTENT_TYPE

DEEP_SECONDS = 10.0


async def livez(context: ApiContext, _call: HttpCall) -> Answer:
    return Answer({"status": "alive", "loop_lag_seconds": context.replies.lag})


async def ready(context: ApiContext, _call: HttpCall) -> Answer:
    context.admission.check()
    return Answer({"status": "ready", "engines": context.service.client.engines})


async def health(context: ApiContext, call: HttpCall) -> Answer:
    """As `ready`; with `?deep=1` an engine has to give a token."""
    if call.scope["query_string"] == b"deep=1":
        context.access.check(call)
        context.admission.check()
        if not await _draws_a_token(context):
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"no token came within {DEEP_SECONDS:g} s")
    return await ready(context, call)


async def metrics(context: ApiContext, _call: HttpCall) -> Answer:
    """For Prometheus. Made beside the loop: it takes milliseconds."""
    others = await context.admin.others()
    return Answer(await asyncio.to_thread(context.metrics.exposition, others), media_type=CONTENT_TYPE)


async def _draws_a_token(context: ApiContext) -> bool:
    service, notifier = context.service, context.replies.notifier
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    request = service.prepare(Prompt(ids=np.zeros(1, np.int32)), params, RequestOptions(timeout=DEEP_SECONDS))
    mailbox = service.mailbox(request, notifier, OutputKind.FINAL)
    news = notifier.news(mailbox)
    try:
        service.client.submit(mailbox)
        await asyncio.wait_for(news, 2 * DEEP_SECONDS)
    except TimeoutError:
        return False
    finally:
        notifier.forget(mailbox)
        service.client.abort(mailbox)
    return mailbox.has_tokens
