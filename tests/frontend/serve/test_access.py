"""Who may enter, and what a key's owner shares with others (A-40 to A-44, A-47)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from tests.frontend.serve.test_bad_input import PRIVATE, refused
from tests.support.served import Served, served

from wavecore.frontend.serve.app import ROUTES
from wavecore.frontend.serve.http.access import Access, salt_of
from wavecore.frontend.serve.http.http_call import HttpCall
from wavecore.frontend.serve.http.refusals import refusal
from wavecore.transport.errors import EngineDead, ModelError, NotSupportedError, ResourceError, ValidationError

KEYS = ["first-secret", "second-secret", "third-secret"]
OPEN = {"/version", "/ping", "/health", "/ready", "/livez", "/metrics"}
PROMPT = {"prompt": [11] * 40, "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def closed(
    scripted_files: list[str], runtime_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEYS[1]}\n\n{KEYS[2]}\n")
    with served(*scripted_files, "--api-key-file", str(keys), WAVECORE_API_KEY=KEYS[0]) as server:
        yield server


def test_every_route_is_closed_but_those_of_a_list(closed: Served) -> None:
    for route in ROUTES:
        path = route.path.replace("{model:path}", "scripted")
        answer = closed.client.request(route.method, path)
        if route.is_open:
            assert route.path in OPEN and answer.status_code == 200
        else:
            refused(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/v1/models", "/nothing", "//v1/models", "/v1/%6dodels", "/health/", "/HEALTH"])
def test_no_path_or_host_opens_a_route(closed: Served, path: str) -> None:
    for method, host in itertools.product(("GET", "OPTIONS", "HEAD"), ("x/health?", "health", "localhost")):
        assert closed.client.request(method, path, headers={"host": host}).status_code == 401
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    assert closed.get(path, headers=upgrade).status_code == 401


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", f"Basic {KEYS[0]}", KEYS[0], f"Bearer {KEYS[0]}x", "Bearer é"]
)
def test_wrong_keys(closed: Served, header: str) -> None:
    refused(closed.get("/v1/models", headers={"authorization": header.encode()}), 401)


def test_right_keys_of_all_sources(closed: Served) -> None:
    for key in KEYS:
        assert closed.get("/v1/models", headers=bearer(key)).status_code == 200
    assert closed.get("/health?deep=1").status_code == 401
    assert closed.get("/health?deep=1", headers=bearer(KEYS[0])).status_code == 200


def test_no_process_shows_a_key(closed: Served) -> None:
    """Of those that it started, in their arguments and their environment."""
    for process in psutil.Process(closed.process.pid).children(recursive=True):
        shown = " ".join(process.cmdline()) + str(process.environ())
        assert not any(key in shown for key in KEYS)


def test_owners_of_keys_share_no_cache(closed: Served) -> None:
    """A-42: a prompt is cached for its owner alone; a salt of the request's own only divides further."""

    def cached(key: str, **more: str) -> int:
        answer = closed.post("/v1/completions", {**PROMPT, **more}, headers=bearer(key)).json()
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached(KEYS[0]), cached(KEYS[0]), cached(KEYS[1]), cached(KEYS[1])] == [0, 32, 0, 32]
    assert [cached(KEYS[0], cache_salt="x"), cached(KEYS[0], cache_salt="x")] == [0, 32]
    assert len({salt_of("", None), salt_of("a", None), salt_of("a", "b"), salt_of("b", "b"), salt_of("", "b")}) == 5


async def nothing(*_: object) -> dict[str, object]:
    return {}


def test_all_keys_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A-41: how long a comparison takes says nothing of which key was nearly right."""
    looked: list[bytes] = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: looked.append(a) or a == b)
    scope = {"headers": [(b"authorization", b"Bearer first-secret")]}
    call = HttpCall(scope, nothing, nothing, 1, lambda *_: pytest.fail("no error"))
    Access(KEYS).check(call)
    assert len(looked) == 3 and call.owner


def test_no_other_origin_is_let_in(closed: Served) -> None:
    answer = httpx.get(closed.url + "/v1/models", headers={**bearer(KEYS[0]), "origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValidationError("messages", "the template failed: no (/models/me/tokenizer_config.json)"), 400),
        (NotSupportedError("/models/me/tokenizer.json has no chat template; give one"), 400),
        (ValidationError("prompt", "not <object object at 0x7f00deadbeef>"), 400),
        (EngineDead("engine 0 (pid 4) ended: /tmp/wavecore-x/in, tcp://10.0.0.1:5000 was reset"), 503),
        (ModelError("/models/me: does not compile"), 500),
        (ResourceError("no memory in /dev/shm/psm_1"), 503),
        (RuntimeError("Traceback (most recent call last): /usr/lib/python3"), 500),
    ],
    ids=lambda value: type(value).__name__,
)
def test_answers_tell_nothing_of_this_machine(error: Exception, status: int) -> None:
    """A-44: for every class of errors."""
    call = HttpCall({"headers": []}, nothing, nothing, 1, lambda *_: pytest.fail("no error"))
    answer = refusal(call, error, 7)
    assert answer.status_code == status
    shown = json.loads(answer.body)["error"]
    assert set(shown) == {"message", "type", "param", "code"}
    assert not PRIVATE.search(shown["message"]) and "pid" not in shown["message"]
    assert ((b"retry-after", b"7") in answer.raw_headers) is (status == 503)
