"""What commands ask of an OpenAI server, ours or another, and a conversation with it."""

import asyncio
import json
import os
import urllib.request
from argparse import Namespace
from typing import Any

from wavecore.frontend.load.event_stream import events, split_url
from wavecore.transport.errors import StartError

ANSWER_SECONDS = 30.0


def api_key(values: Namespace) -> str:
    return str(values.api_key or os.environ.get("OPENAI_API_KEY", ""))


def endpoint(values: Namespace, path: str) -> str:
    return f"{values.url.rstrip('/').removesuffix('/v1')}/v1/{path}"


def served_model(values: Namespace) -> str:
    """What `--model` names, else the first that the server has.

    Raises:
        ConfigError: no URL. StartError: no server answers there, or it refuses the key.
    """
    split_url(values.url)
    headers = {"Authorization": f"Bearer {key}"} if (key := api_key(values)) else {}
    request = urllib.request.Request(endpoint(values, "models"), headers=headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the requests that follow
    try:
        with direct.open(request, timeout=ANSWER_SECONDS) as answer:
            first = json.load(answer)["data"][0]["id"]
            return str(first if values.model == "default" else values.model)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StartError(f"no OpenAI server with a model answers at {values.url}: {error}") from error


def remote_answer(values: Namespace, model: str, messages: list[dict[str, Any]]) -> str:
    """Print an answer as it comes. Returns its text.

    Raises:
        RequestError: it failed.
    """
    names = ("max_tokens", "temperature", "top_p", "stop")
    body = {name: getattr(values, name) for name in names} | {"seed": values.sampling_seed}
    body |= {"top_k": values.top_k} if values.top_k else {}  # not in OpenAI's own API
    return asyncio.run(_print_answer(values, {**body, "model": model, "messages": messages, "stream": True}))


async def _print_answer(values: Namespace, body: dict[str, Any]) -> str:
    text = ""
    async for event in events(endpoint(values, "chat/completions"), body, api_key(values)):
        text += event.text
        print(event.text, end="", flush=True)
    print(flush=True)
    return text
