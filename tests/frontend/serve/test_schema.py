"""/openapi.json says what is taken, and nothing that fits it, or nearly, ends in a fault of the server."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.served import Served
from tests.support.waiting import until

from wavecore.frontend.serve.api.schema import FIELDS, ChatRequest, CompletionRequest
from wavecore.frontend.serve.app import ROUTES


def test_every_route_is_in_it(server: Served) -> None:
    document = server.get("/openapi.json").json()
    listed = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert listed == {(route.method, route.path.replace(":path}", "}")) for route in ROUTES}
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"] and "temperature" in chat["properties"]


def test_no_field_is_in_two_places() -> None:
    known = {*ChatRequest.__struct_fields__} & {*CompletionRequest.__struct_fields__}
    assert not known & FIELDS.keys()
    assert all(rule.get("otherwise") or rule.get("allowed") == "any" for rule in FIELDS.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_schemathesis_finds_no_fault(server: Served) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json", "--checks"]
    command += ["not_a_server_error,content_type_conformance", "--max-examples", "60", "--request-timeout", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    until(server.is_idle, "the end of all requests")
