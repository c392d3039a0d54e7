"""Public bug reports about servers, replayed over HTTP; names in comments are those of a collection (E-01 ...)."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import httpx
import pytest
from tests.support.scripted_model import EOS, ids_of
from tests.support.served import Served
from tests.support.waiting import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def both(server: Served, first: int, **values: Any) -> dict[str, Any]:
    """The only choice, after checking that a stream gives the same."""
    body = {"prompt": [first], "temperature": 0, "max_tokens": 32, "return_token_ids": True, **values}
    [whole] = server.post(COMPLETIONS, body).json()["choices"]
    choices = [choice for event in server.events(COMPLETIONS, body) for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [t for choice in choices for t in choice.get("token_ids", [])] == whole["token_ids"]
    *others, last = choices
    assert (last["finish_reason"], last["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
    assert all(choice["finish_reason"] is None for choice in others)  # the key is always there
    found: dict[str, Any] = whole
    return found


LAST = ids_of("visible")[-1]


@pytest.mark.parametrize(
    ("first", "values", "text", "finish"),
    [
        (300, {"stop": "DEFGHIJ"}, "", "stop"),  # E-01
        (300, {"stop": ["HIJ"]}, "DEFG", "stop"),  # E-02
        (301, {"stop": "ZZZ", "max_tokens": len(ids_of("abc", "Z", "Z"))}, "abcZZ", "length"),  # E-03
        (304, {"stop_token_ids": [EOS]}, "visible", "stop"),  # E-06
        (300, {"stop": "GH", "include_stop_str_in_output": True}, "DEFGH", "stop"),  # E-07
        (304, {"stop_token_ids": [LAST], "include_stop_str_in_output": True}, "visible", "stop"),
        (302, {}, "한국어 你好 👩‍👩‍👧‍👦!", "stop"),  # E-28
        (303, {"min_tokens": 5}, "", "stop"),  # E-11
        (300, {"stop": ["never"], "logprobs": 1}, "DEFGHIJ more", "stop"),
    ],
)
def test_text(server: Served, first: int, values: dict[str, Any], text: str, finish: str) -> None:
    found = both(server, first, **values)
    assert (found["text"], found["finish_reason"]) == (text, finish)
    if values.get("min_tokens"):
        assert len(found["token_ids"]) > values["min_tokens"]
    if found["logprobs"]:  # E-08: as many as there are tokens
        assert len(found["logprobs"]["tokens"]) == len(found["token_ids"])


def test_a_character_that_is_cut_in_the_middle(server: Served) -> None:
    """E-28: what never completes is shown once, at the end."""
    found = both(server, 302, max_tokens=len(ids_of("한국어")) + 2)
    assert found["text"].startswith("한국어") and "\ufffd" not in found["text"][:-2]


def test_lengths(server: Served) -> None:
    """E-18, E-20: the last prompt that fits gives a token; the limit is the one that is shown."""
    limit = server.get("/v1/models").json()["data"][0]["max_model_len"]
    answer = server.post(COMPLETIONS, {"prompt": [5] * (limit - 1), "max_tokens": 10**6, "ignore_eos": True}).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 1
    refused = server.post(COMPLETIONS, {"prompt": [5] * (limit + 1)})
    assert refused.status_code == 400
    assert str(limit) in refused.json()["error"]["message"] and str(limit + 1) in refused.json()["error"]["message"]


def test_a_prompt_is_scored(real_server: Served) -> None:
    """E-19, E-26: what lm_eval asks for; the prefix cache changes nothing."""
    body = {"prompt": "The capital of France", "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    first, second = (real_server.post(COMPLETIONS, body).json() for _ in range(2))
    [choice] = first["choices"]
    assert choice == second["choices"][0]
    scores = choice["logprobs"]
    assert choice["text"] == body["prompt"] == "".join(scores["tokens"])
    assert first["usage"]["completion_tokens"] == 0
    assert scores["token_logprobs"][0] is None and all(score < 0 for score in scores["token_logprobs"][1:])
    [streamed] = [c for event in real_server.events(COMPLETIONS, body) for c in event["choices"] if c["text"]]
    assert streamed["logprobs"] == scores


def test_prompt_logprobs_of_an_answer_without_echo(real_server: Served) -> None:
    """They are made when they are read, which JSON's encoder does not do."""
    body = {"prompt": "The capital of France", "prompt_logprobs": 2, "max_tokens": 1, "return_token_ids": True}
    [choice] = real_server.post("/v1/completions", body).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(choice["prompt_token_ids"]) - 1 > 1
    for token, entries in zip(choice["prompt_token_ids"][1:], others, strict=True):
        assert {1, 2} <= {entry["rank"] for entry in entries.values()} and entries[str(token)]["logprob"] <= 0


def test_logprobs_of_a_chat(real_server: Served) -> None:
    """E-22, E-23: without top_logprobs the list is empty; values are the raw model's, whatever is sampled by."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "logprobs": True}
    greedy = real_server.post(CHAT, {**body, "temperature": 0, "top_logprobs": 1}).json()["choices"][0]
    warm = {**body, "temperature": 0.5, "top_k": 1, "presence_penalty": 0.1}
    found = real_server.post(CHAT, warm).json()["choices"][0]["logprobs"]["content"]
    assert all(token["top_logprobs"] == [] for token in found)
    best = greedy["logprobs"]["content"]
    assert [token["token"] for token in best] == [token["top_logprobs"][0]["token"] for token in best]
    assert found[0]["logprob"] == pytest.approx(best[0]["logprob"], abs=1e-3)


def test_choices_and_cached_tokens(server: Served) -> None:
    """E-31, E-32: each choice has its index and text; cached tokens count once."""
    body = {"prompt": [7] * 40, "n": 8, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    server.post(COMPLETIONS, body)
    answer = server.post(COMPLETIONS, body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    assert answer["usage"]["prompt_tokens"] == 40 and answer["usage"]["completion_tokens"] == 48
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    texts = dict.fromkeys(range(8), "")
    for event in server.events(COMPLETIONS, body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in answer["choices"]}


def test_seeds(real_server: Served) -> None:
    """E-29, E-45, E-47: a seeded answer is the same beside others, with penalties and with masked logits."""
    for more in ({"seed": 7}, {"temperature": 0, "repetition_penalty": 1.5}, {"seed": 7, "allowed_token_ids": [9, 80]}):
        body = {"prompt": "hello", "max_tokens": 12, "ignore_eos": True, **more}
        answers = [real_server.post(COMPLETIONS, body).json()["choices"][0]["text"]]

        def other() -> None:
            real_server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 12})

        for _ in range(2):
            beside = threading.Thread(target=other)
            beside.start()
            answers.append(real_server.post(COMPLETIONS, body).json()["choices"][0]["text"])
            beside.join()
        assert len(set(answers)) == 1


def test_one_id_many_times(server: Served) -> None:
    """E-39, E-55: the same id again, at once, and while it runs: nobody gets another one's answer or abort."""
    body = {"prompt": [300], "temperature": 0, "max_tokens": 32}
    headers = {"x-request-id": "same"}
    texts: list[str] = []

    def one() -> None:
        texts.append(server.post(COMPLETIONS, body, headers=headers).json()["choices"][0]["text"])

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(server.url + COMPLETIONS, json=body, headers=headers, timeout=0.003)
    for thread in threads:
        thread.join()
    assert texts == ["DEFGHIJ more"] * 8
    until(server.is_idle, "the end of all requests")


@pytest.mark.slow
def test_a_small_cache_changes_nothing(scripted_files: list[str], server: Served) -> None:
    """E-44: six long requests in eight blocks; they are preempted, and give what they give alone."""
    from tests.support.served import served

    bodies = [{"prompt": [20 + i] * 10, "max_tokens": 60, "temperature": 0, "ignore_eos": True} for i in range(6)]
    alone = [server.post(COMPLETIONS, body).json()["choices"][0]["text"] for body in bodies]
    together: dict[int, str] = {}
    with served(*scripted_files, "--num-gpu-blocks-override", "9", "--max-model-len", "100") as small:

        def one(place: int) -> None:
            events = small.events(COMPLETIONS, bodies[place])
            together[place] = "".join(choice["text"] for event in events for choice in event["choices"])

        threads = [threading.Thread(target=one, args=[place]) for place in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [together[place] for place in range(6)] == alone


def test_many_prompts(server: Served) -> None:
    """Each has its place, also where they are too long together to be encoded in the loop."""
    prompts = ["hello " * count for count in range(1, 41)]
    body = {"prompt": prompts, "max_tokens": 1, "echo": True, "seed": 1}
    choices = server.post(COMPLETIONS, body).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(40))
    assert all(choice["text"].startswith(prompt) for choice, prompt in zip(choices, prompts, strict=True))
