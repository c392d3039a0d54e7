"""/v1/chat/completions, and what it would send to an engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.outputs import CompletionOutput, PositionLogprobs
from wavecore.frontend.prompts import Prompt
from wavecore.frontend.serve.admission import options_of
from wavecore.frontend.serve.api.events import Events, Shape, top_of
from wavecore.frontend.serve.api.fields_to_params import sampling_params
from wavecore.frontend.serve.api.schema import ChatRequest, TokenizeRequest
from wavecore.frontend.serve.context import ApiContext
from wavecore.frontend.serve.http.http_call import Answer, HttpCall
from wavecore.frontend.text.messages import ChatOptions
from wavecore.transport.errors import NotSupportedError, ValidationError


def _choice(choice: CompletionOutput, _echo: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": choice.text, "refusal": None}}


def token_logprobs(rows: Sequence[PositionLogprobs | str], count: int) -> dict[str, Any]:
    content = []
    for row in rows:
        if not isinstance(row, str):
            chosen, *best = [_token(*entry) for entry in top_of(row, count)]
            content.append({**chosen, "top_logprobs": best})
    return {"content": content, "refusal": None}


def _token(_id: int, text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


SHAPE = Shape(
    whole="chat.completion",
    chunk="chat.completion.chunk",
    choice=_choice,
    logprobs=token_logprobs,
    first=b'"delta":{"role":"assistant","content":""}',
    text=(b'"delta":{"content":', b"}"),
    empty=b'"delta":{}',
)


async def chat_completions(context: ApiContext, call: HttpCall) -> None:
    body = await context.read(call, ChatRequest)
    params, options = _settings(context, call, body)
    prompt = await context.render(_messages(body.messages), chat_options(body), options)
    form = Events(SHAPE, f"chatcmpl-{call.id}", context.model, params, body.stream_options, body.return_token_ids)
    await context.generate(call, [prompt], params, options, form.whole, form if body.stream else None)


async def render(context: ApiContext, call: HttpCall) -> Answer:
    """What /inference/v1/generate takes, for routers that look at token ids."""
    body = await context.read(call, ChatRequest, generates=False)
    params, options = _settings(context, call, body)
    if params.stop:
        raise ValidationError("stop", "is text, and /inference/v1/generate sees none; use stop_token_ids")
    prompt = await context.render(_messages(body.messages), chat_options(body), options)
    wire = context.service.prepare(prompt, params, options).wire
    ids = [] if prompt.ids is None else prompt.ids.tolist()
    given = {"stream": bool(body.stream)}
    given |= {name: getattr(options, name) for name in ("priority", "timeout", "data_parallel_rank")}
    return Answer({"model": context.model, "token_ids": ids, "sampling_params": wire, **given})


async def conversation(context: ApiContext, body: TokenizeRequest) -> Prompt:
    """A conversation that is only to be counted."""
    return await context.render(_messages(body.messages or []), chat_options(body), RequestOptions())


def chat_options(body: ChatRequest | TokenizeRequest) -> ChatOptions:
    opens = body.add_generation_prompt
    continues = bool(body.continue_final_message)
    if opens and continues:
        raise ValidationError("continue_final_message", "and add_generation_prompt exclude each other")
    return ChatOptions(
        add_generation_prompt=not continues if opens is None else opens,
        continue_final_message=continues,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _settings(context: ApiContext, call: HttpCall, body: ChatRequest) -> tuple[SamplingParams, RequestOptions]:
    if body.top_logprobs is not None and not body.logprobs:
        raise ValidationError("top_logprobs", "needs logprobs: true")
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(context.service.default_params, body, max_tokens=most, logprobs=logprobs)
    return params, options_of(call, body)


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose contents are texts, as nearly all templates take them: parts are joined by ends of lines."""
    found = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join([_part(i, part) for part in content])
        found.append({**message, "content": content} if "content" in message else dict(message))
    return found


def _part(index: int, part: Any) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if kind != "text" and isinstance(kind, str):
        raise NotSupportedError(f"messages: message {index} holds a part of type {kind!r:.40}; only text is supported")
    if not isinstance(text, str):
        raise ValidationError("messages", f'message {index}: a part must be {{"type": "text", "text": ...}}')
    return text
