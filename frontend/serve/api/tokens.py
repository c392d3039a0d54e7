"""Without a conversation: text to ids and back, ids in and ids out, and embeddings."""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.mailbox import EMBEDDING_PARAMS
from wavecore.frontend.outputs import RequestOutput
from wavecore.frontend.prompts import Prompt, token_ids
from wavecore.frontend.serve.admission import options_of
from wavecore.frontend.serve.api import schema
from wavecore.frontend.serve.api.chat import conversation, token_logprobs
from wavecore.frontend.serve.api.events import Events, Shape
from wavecore.frontend.serve.api.fields_to_params import prompts_of
from wavecore.frontend.serve.context import ApiContext
from wavecore.frontend.serve.http.http_call import Answer, HttpCall
from wavecore.frontend.serve.http.stream import escaped
from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.checks import OF_REQUEST


async def tokenize(context: ApiContext, call: HttpCall) -> Answer:
    body = await context.read(call, schema.TokenizeRequest, generates=False)
    tokenizer = context.service.need_tokenizer("tokenize")
    if (body.prompt is None) == (body.messages is None):
        raise ValidationError("prompt", "or messages: give one of them")
    if body.prompt is None:
        prompt = await conversation(context, body)
        ids = [] if prompt.ids is None else prompt.ids.tolist()
    else:
        tokenizer.check_length(body.prompt, context.service.max_model_len)
        ids = await asyncio.to_thread(tokenizer.encode, body.prompt, body.add_special_tokens is not False)
    texts = [tokenizer.decode_token(token) for token in ids] if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": context.service.max_model_len, "tokens": ids}
    return Answer({**answer, "token_strs": texts})


async def detokenize(context: ApiContext, call: HttpCall) -> Answer:
    body = await context.read(call, schema.DetokenizeRequest, generates=False)
    OF_REQUEST.entries("tokens", body.tokens, context.service.max_model_len)
    text = context.service.need_tokenizer("detokenize").decode(body.tokens, skip_special_tokens=False)
    return Answer({"prompt": text})


GENERATED = Shape("generate", "generate.chunk", lambda *_: {}, token_logprobs)


async def generate(context: ApiContext, call: HttpCall) -> None:
    """/inference/v1/generate: what /v1/chat/completions/render gives, to token ids."""
    body = await context.read(call, schema.GenerateRequest)
    try:
        params = SamplingParams(**{**body.sampling_params, "detokenize": False})
    except TypeError:
        unknown = body.sampling_params.keys() - set(SamplingParams.__dataclass_fields__)
        raise ValidationError("sampling_params", f"{', '.join(sorted(unknown)):.200} is none of them") from None
    options = options_of(call, body)
    form = Events(GENERATED, call.id, context.model, params, body.stream_options, token_ids=True)
    prompt = Prompt(ids=token_ids(body.token_ids))
    await context.generate(call, [prompt], params, options, form.whole, form if body.stream else None)


async def embeddings(context: ApiContext, call: HttpCall) -> None:
    body = await context.read(call, schema.EmbeddingRequest)
    options = options_of(call, body)
    prompts = prompts_of("input", body.input, 1, int(context.service.resolved["max_num_queued_reqs"]))
    encoded = await context.service.encode_for_loop(prompts, options)
    whole = partial(_vectors, context.model, body.encoding_format == "base64")
    await context.generate(call, encoded, EMBEDDING_PARAMS, replace(options, pooling=body.pooling or "mean"), whole)


def _vectors(model: str, as_base64: bool, outputs: Sequence[RequestOutput]) -> bytes:
    data = []
    for place, output in enumerate(outputs):
        assert output.embedding is not None
        vector = output.embedding.astype("<f4")
        shown = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
        data.append({"object": "embedding", "index": place, "embedding": shown})
    count = sum(len(output.prompt_token_ids) for output in outputs)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return escaped({"object": "list", "model": model, "data": data, "usage": usage})
