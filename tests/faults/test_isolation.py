"""One request is to blame: it ends, and nobody else notices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.choice import Choice
from wavecore.frontend.client.mailbox import OutputKind
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.client.request import EngineRequest
from wavecore.frontend.prompts import as_prompt
from wavecore.transport.errors import NumericalError, ResourceError, ValidationError, WavecoreError

BAD = 7  # first prompt token of the request at fault


def mates(deployed: Any) -> list[Any]:
    return [deployed.stream(i, 60) for i in range(8)]


def test_nan_in_one_row(deploy: Any) -> None:
    """The logits of one request hold NaN or infinity.

    That request ends with `NumericalError`; its blocks leave the prefix cache; its batch mates get the same tokens as
    without it.
    """
    with deploy({"faults": {"nan_token": BAD}, "step_seconds": 0.005}) as deployed:
        others = mates(deployed)
        bad = deployed.stream(0, 10, prompt=(BAD, *range(1, 60)))
        assert isinstance(bad.error, NumericalError)
        for stream in others:
            stream.check_finished()
        assert deployed.call("memory_stats")["blocks_in_use"] == 0


def test_one_of_a_batch_fails(deploy: Any) -> None:
    """One request of an `LLM.generate` or `LLM.embed` of many fails.

    Its output carries the error in `.error`; the others finish. Where all fail, or any with `raise_on_error=True`, the
    first error is raised.
    """
    with deploy({"faults": {"nan_token": 666}}) as deployed:
        llm, params = deployed.llm, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        prompts = [[1, 2], [666, 2], [3, 4]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
        assert isinstance(outputs[1].error, NumericalError)
        embeddings = llm.embed(prompts, use_tqdm=False)
        assert [e.error is None for e in embeddings] == [True, False, True]
        assert [len(e.outputs.embedding) > 0 for e in embeddings] == [True, False, True]
        for call in (
            lambda: llm.generate(prompts, params, use_tqdm=False, raise_on_error=True),
            lambda: llm.generate(prompts[1:2] * 2, params, use_tqdm=False),
            lambda: llm.embed(prompts[1:2], use_tqdm=False),
        ):
            with pytest.raises(NumericalError):
                call()


def test_out_of_memory_once(deploy: Any) -> None:
    """A step runs out of GPU or host memory.

    The running requests are preempted and computed again, in smaller steps for a while; all of them finish.
    """
    with deploy({"faults": {"oom_at_steps": [6]}, "step_seconds": 0.005}) as deployed:
        for stream in mates(deployed):
            stream.check_finished()
        assert deployed.engine.restarts == 0


@pytest.mark.slow  # a step of one token is tried for five seconds; test_recovery.py has a clock of its own
def test_out_of_memory_again_and_again(deploy: Any) -> None:
    """A request needs more memory than there is, in every step that it takes part in.

    It ends with `ResourceError`, found by its costly options or because it fails alone; the others finish.
    """
    with deploy({"faults": {"oom_token": BAD}, "step_seconds": 0.005}) as deployed:
        others = mates(deployed)
        bad = deployed.stream(0, 10, prompt=(BAD, *range(1, 300)))
        assert isinstance(bad.error, ResourceError)
        for stream in others:
            stream.check_finished()
        assert deployed.engine.restarts == 0


def test_values_are_checked_in_the_engine_again(deploy: Any) -> None:
    """A client sends a value out of bounds past its own checks.

    The engine refuses the request by the field's name; nothing else is affected.
    """
    lies: list[tuple[dict[str, Any], list[int], str]] = [
        ({"temperature": -1.0}, [1], "temperature"),
        ({"n": 10**9}, [1], "n"),
        ({"max_tokens": -5}, [1], "max_tokens"),
        ({"logit_bias": {10**6: 1.0}}, [1], "logit_bias"),
        ({"unknown": 1}, [1], "unknown"),
        ({}, [10**6], "prompt"),
        ({}, [-1], "prompt"),
        ({}, [], "prompt"),
        ({}, [1] * 5000, "prompt"),
    ]
    with deploy() as deployed:
        service = deployed.llm._service
        honest = service.prepare(as_prompt({"prompt_token_ids": [1]}), SamplingParams(max_tokens=5, temperature=0))
        for wire, ids, field in lies:
            lie = EngineRequest("lie", None, np.array(ids, np.int32), honest.params, {"max_tokens": 5, **wire})
            error = _end_of(service, lie)
            assert isinstance(error, ValidationError), (wire, ids)
            assert field in str(error)
            deployed.check_serving()


def test_failing_detokenizer(deploy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turning tokens into text fails for one request.

    That stream ends with an error and is aborted in the engine; the others go on.
    """
    feed = Choice.feed

    def break_one(self: Choice, tokens: Any, *rest: Any, **more: Any) -> None:
        if tokens and tokens[0] == 999:
            raise RuntimeError("no such byte")
        feed(self, tokens, *rest, **more)

    monkeypatch.setattr(Choice, "feed", break_one)
    with deploy({"step_seconds": 0.005, "scripts": {str(BAD): [1, 2, 3, 999, 4, 5]}}) as deployed:
        others = mates(deployed)
        bad = deployed.stream(0, 99, prompt=(BAD, 1))
        assert isinstance(bad.error, WavecoreError)
        assert "no such byte" in str(bad.error)
        for stream in others:
            stream.check_finished()


def _end_of(service: Any, request: EngineRequest) -> BaseException | None:
    notifier = ThreadNotifier()
    mailbox = service.mailbox(request, notifier, OutputKind.FINAL)
    service.client.submit(mailbox)
    assert notifier.wait(30) is mailbox
    return mailbox.take().error
