"""/v1/completions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wavecore.frontend.outputs import CompletionOutput, PositionLogprobs
from wavecore.frontend.prompts import Prompt
from wavecore.frontend.serve.admission import options_of
from wavecore.frontend.serve.api.events import Events, Shape, top_of
from wavecore.frontend.serve.api.fields_to_params import prompts_of, sampling_params
from wavecore.frontend.serve.api.schema import CompletionRequest
from wavecore.frontend.serve.context import ApiContext
from wavecore.frontend.serve.http.http_call import HttpCall

MAX_TOKENS = 16  # where a request says nothing; OpenAI's default


def _choice(choice: CompletionOutput, echo: str) -> dict[str, Any]:
    return {"text": echo + choice.text}


def _logprobs(rows: Sequence[PositionLogprobs | str], count: int) -> dict[str, Any]:
    """Columns, one entry a token. `text_offset` counts characters from the first of these tokens."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    best: list[dict[str, float] | None] = []
    offsets: list[int] = []
    at = 0
    for row in rows:
        entries = [] if isinstance(row, str) else top_of(row, count)
        tokens.append(row if isinstance(row, str) else entries[0][1])
        chosen.append(entries[0][2] if entries else None)
        best.append({text: logprob for _, text, logprob in entries} if entries else None)
        offsets.append(at)
        at += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": best, "text_offset": offsets}


SHAPE = Shape("text_completion", "text_completion", _choice, _logprobs)


async def completions(context: ApiContext, call: HttpCall) -> None:
    body = await context.read(call, CompletionRequest)
    changes: dict[str, Any] = {"logprobs": body.logprobs}
    if body.max_tokens is None:
        changes["max_tokens"] = MAX_TOKENS
    if body.echo and body.logprobs is not None:
        changes["prompt_logprobs"] = body.logprobs
    params = sampling_params(context.service.default_params, body, **changes)
    options = options_of(call, body)
    most = int(context.service.resolved["max_num_queued_reqs"])
    given = prompts_of("prompt", body.prompt, params.n, most)
    parse = body.parse_special is not False
    prompts = await context.service.encode_for_loop([replace(prompt, parse_special=parse) for prompt in given], options)
    echoes = [_echo(context, prompt) for prompt in prompts] if body.echo else ()
    name, options_of_stream = f"cmpl-{call.id}", body.stream_options
    form = Events(SHAPE, name, context.model, params, options_of_stream, body.return_token_ids, echoes)
    await context.generate(call, prompts, params, options, form.whole, form if body.stream else None)


def _echo(context: ApiContext, prompt: Prompt) -> tuple[str, str]:
    """The prompt's text, and that of its first token."""
    tokenizer = context.service.need_tokenizer("echo")
    ids = [] if prompt.ids is None else prompt.ids.tolist()
    text = tokenizer.decode(ids, skip_special_tokens=False) if prompt.text is None else prompt.text
    return text, tokenizer.decode_token(ids[0])
