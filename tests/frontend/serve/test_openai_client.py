"""OpenAI's own client, which is what most programs use, and the bytes that it reads."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.support.served import Served

USAGE = {"continuous_usage_stats": True}
GOLDEN = Path(__file__).parent / "golden"
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(params=["server", "real_server"])
def any_server(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def client(any_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{any_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [client.models.retrieve(model.id) for model in models] == models
    for model in models:  # several names of one, of which answers have the first
        answer = client.chat.completions.create(model=model.id, messages=MESSAGES, max_completion_tokens=1)
        assert answer.model == models[0].id
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.models.retrieve("other")


def test_a_model_has_all_its_names(server: Served) -> None:
    assert [card["id"] for card in server.get("/v1/models").json()["data"]] == ["scripted", "also"]


def test_chat(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    given: dict[str, Any] = {"model": model, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**given, logprobs=True, top_logprobs=2)
    [choice] = whole.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert choice.logprobs and choice.logprobs.content
    tokens = choice.logprobs.content
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)
    chunks = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        choice.finish_reason
    ]
    assert chunks[-1].choices == [] and chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    given: dict[str, Any] = {"model": model, "prompt": ["hello", "you"], "n": 2, "max_tokens": 6, "seed": 3}
    whole = client.completions.create(**given)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**given, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}


async def test_many_at_once(any_server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{any_server.url}/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id

        async def one(seed: int) -> str:
            text = ""
            stream = await client.completions.create(model=model, prompt="hi", max_tokens=8, seed=seed, stream=True)
            async for chunk in stream:
                text += chunk.choices[0].text
            return text

        streamed = await asyncio.gather(*[one(seed) for seed in range(16)])
        whole = await asyncio.gather(
            *[client.completions.create(model=model, prompt="hi", max_tokens=8, seed=seed) for seed in range(16)]
        )
    assert streamed == [answer.choices[0].text for answer in whole]


def test_embeddings(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.embeddings.create(model=model, input=["hello", "you"])  # this client asks for base64
    plain = client.embeddings.create(model=model, input=["hello", "you"], encoding_format="float")
    for one, other in zip(answer.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
        assert sum(value * value for value in one.embedding) == pytest.approx(1.0, abs=1e-4) or model == "scripted"


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("chat", "/v1/chat/completions", {"messages": MESSAGES}),
        ("chat_logprobs", "/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "max_tokens": 1}),
        ("completion", "/v1/completions", {"prompt": [302], "max_tokens": 40}),
        (
            "completion_usage",
            "/v1/completions",
            {"prompt": [301], "max_tokens": 1, "stream_options": {"continuous_usage_stats": True}},
        ),
        ("error", "/v1/completions", {"prompt": [301], "max_tokens": -1}),
    ],
)
def test_the_bytes_of_an_answer(server: Served, name: str, path: str, body: dict[str, Any]) -> None:
    """As in golden/, but for the time, and where texts are cut: that depends on the pace of this machine."""
    answer = server.post(path, {**body, "stream": True, "temperature": 0}, headers={"x-request-id": "golden"})
    data = re.sub(rb'"created":\d+', b'"created":0', answer.content)
    lines = [re.sub(rb'("(?:text|content)":)"[^"]+"', rb'\1"..."', line) for line in data.split(b"\n\n")]
    shown = b"\n\n".join([line for line, _ in itertools.groupby(lines)])
    assert shown == (GOLDEN / f"{name}.txt").read_bytes()
