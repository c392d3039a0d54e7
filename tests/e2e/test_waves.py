"""Engines in lockstep, as processes: equal forward passes, waves that begin and end anyhow, pauses, and their end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.scripted_model import scripted_output
from tests.support.waiting import until

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.async_llm import AsyncLLM
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import ConfigError, NotSupportedError, ValidationError, WavecoreError

SCRIPT: dict[str, Any] = {"vocab_size": 1000, "max_model_len": 4096, "num_blocks": 400, "eos_token_id": []}
Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """`with start(ranks, script..., setting=...) as llm:`; at the end all ranks have run as many forward passes."""

    @contextmanager
    def make(ranks: int, script: dict[str, Any] | None = None, **settings: Any) -> Iterator[LLM]:
        path = tmp_path / "script.json"
        path.write_text(json.dumps({**SCRIPT, **(script or {})}))
        settings = {"max_num_seqs": 64, "skip_tokenizer_init": True, "disable_tqdm": True, **settings}
        llm = LLM(f"scripted:{path}", data_parallel_size=ranks, dp_lockstep=True, **settings)
        try:
            yield llm
            if llm.has_engine():
                in_step(llm)
        finally:
            llm.shutdown()

    return make


def prompt(number: int) -> list[int]:
    return [(number * 7919 + i) % 509 + 1 for i in range(5 + number % 7)]


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0)


def ask(llm: LLM, numbers: Sequence[int], count: int) -> None:
    """Requests by number, at once, each answered right."""
    outputs = llm.generate([{"prompt_token_ids": prompt(number)} for number in numbers], params(count))
    for number, output in zip(numbers, outputs, strict=True):
        right, _ = scripted_output(prompt(number), vocab_size=SCRIPT["vocab_size"], max_tokens=count, temperature=0)
        assert output.outputs[0].token_ids == right


def send(llm: LLM, number: int, count: int, **options: Any) -> Any:
    """One request, in a thread of its own; returns its output when asked."""
    found: list[Any] = []

    def run() -> None:
        try:
            [output] = llm.generate([{"prompt_token_ids": prompt(number)}], params(count), **options)
            found.append(output.outputs[0].token_ids)
        except WavecoreError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(60)
        return found[0]

    return result


def in_step(llm: LLM) -> dict[str, float]:
    """When the wave is over: the same passes, real and dummy together, and the same waves on all ranks. Returns the sum
    of their stats."""

    def equal() -> list[dict[str, Any]] | None:
        stats = llm.step_stats()
        counts = {(stat["steps"] + stat["dummy_steps"], stat["waves"]) for stat in stats}
        return stats if len(counts) == 1 and not any(s["running"] + s["waiting"] for s in stats) else None

    stats = until(equal, "equal forward passes")
    return {name: sum(stat[name] for stat in stats) for name in ("steps", "dummy_steps", "waves", "output_tokens")}


@pytest.mark.parametrize("ranks", [2, 4])
def test_forward_passes_are_equal(start: Start, ranks: int) -> None:
    """Whatever the load: 0, 1, 5 and 100 prompts a rank, of any length; prompts and decode steps side by side."""
    with start(ranks, max_num_batched_tokens=128) as llm:
        for prompts in (0, 1, 5 * ranks, 100 * ranks):
            ask(llm, range(prompts), 12)
            in_step(llm)
        ask(llm, range(3), 150)
        assert in_step(llm)["dummy_steps"] > 0, "a rank without a step runs along"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "passes"), [(2, 10_000), (2, 100_000), (4, 100_000)])
def test_forward_passes_are_equal_for_long(start: Start, ranks: int, passes: int) -> None:
    """Each begins with an agreement; requests of many lengths begin and end at any time on any rank."""
    with start(ranks) as llm:
        done = 0.0
        while done < passes * ranks:
            streams = [send(llm, number, 100 * number + 50) for number in range(3 * ranks)]
            assert [len(stream()) for stream in streams] == [100 * number + 50 for number in range(3 * ranks)]
            stats = in_step(llm)
            done = stats["steps"] + stats["dummy_steps"]


@pytest.mark.slow
def test_engines_of_several_ranks(start: Start) -> None:
    """Votes and each engine's steps for its workers pass through one group's memory."""
    with start(2, tensor_parallel_size=2, max_num_batched_tokens=128) as llm:
        for prompts in (1, 40):
            ask(llm, range(prompts), 12)
            in_step(llm)
        llm.pause()
        llm.resume()
        ask(llm, range(3), 150)


def test_each_rank_begins_waves(start: Start) -> None:
    """The first request after all were idle comes to each rank in turn."""
    with start(4) as llm:
        for turn in range(12):
            before = in_step(llm)["waves"]
            ask(llm, [turn], 3)  # the client sends it to the least loaded, in turn
            until(lambda begun=before: in_step(llm)["waves"] > begun, "the end of its wave")
        assert all(stat["finished"] == 3 for stat in llm.step_stats())


@pytest.mark.parametrize(
    ("ranks", "requests"), [(2, 300), *(pytest.param(ranks, 1000, marks=pytest.mark.slow) for ranks in (2, 4))]
)
def test_requests_that_come_as_a_wave_ends(start: Start, ranks: int, requests: int) -> None:
    """Each sent when the last one's end is known: none is missed."""
    with start(ranks) as llm:
        for number in range(requests):
            ask(llm, [number], 1)
        assert in_step(llm)["output_tokens"] == requests


def test_a_wave_ends_with_its_last_output(start: Start) -> None:
    """A pass after the last output would be a dummy of the rank that had it."""
    with start(2) as llm:
        for _ in range(20):
            ask(llm, [1], 10)
            in_step(llm)
        stats = in_step(llm)
        assert (stats["steps"], stats["dummy_steps"]) == (200, 200)


@pytest.mark.parametrize("pauses", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_pauses(start: Start, pauses: int) -> None:
    """At any time of a wave: nothing moves in one, and nothing is lost by it."""
    tokens = 3 * pauses
    with start(2, {"step_seconds": 0.0005}) as llm, LLM.connect(llm.runtime_dir) as other:
        streams = [send(llm, number, tokens) for number in range(4)]
        until(lambda: sum(stat["running"] for stat in llm.step_stats()) == 4)
        for turn in range(pauses):
            llm.pause()
            if turn % 10 == 0:
                before, after = llm.step_stats(), other.step_stats()
                assert [stat["steps"] for stat in before] == [stat["steps"] for stat in after]
                assert len({stat["steps"] + stat["dummy_steps"] for stat in after}) == 1
            other.resume()
        for number, stream in enumerate(streams):
            right, _ = scripted_output(prompt(number), vocab_size=1000, max_tokens=tokens, temperature=0)
            assert stream() == right


def test_a_paused_group_queues_requests_and_keeps_deadlines(start: Start) -> None:
    with start(2) as llm:
        llm.pause()
        llm.pause()  # once more changes nothing
        waiting = send(llm, 1, 5)
        until(lambda: sum(stat["waiting"] for stat in llm.step_stats()) == 1)
        assert send(llm, 2, 5, timeout=0.2)() == []
        llm.resume()
        llm.resume()
        assert len(waiting()) == 5


def test_a_client_that_dies_in_a_pause(start: Start) -> None:
    """Any other client may end it."""
    with start(2) as llm:
        program = f"from wavecore import LLM; import os; LLM.connect({str(llm.runtime_dir)!r}).pause(); os._exit(0)"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
        waiting = send(llm, 1, 5)
        until(lambda: sum(stat["waiting"] for stat in llm.step_stats()) == 1)
        llm.resume()
        assert len(waiting()) == 5


def test_a_client_that_leaves_in_an_update(start: Start) -> None:
    """Nobody else knows of its pause, which ends with it."""
    with start(2) as llm:
        with LLM.connect(llm.runtime_dir) as other:
            until(lambda: all(len(each._service.client.engines) == 2 for each in (llm, other)), "connections")
            other._service.client.call("begin_update", engine=0).result()
            other.pause()
            with pytest.raises(ValidationError, match="another update_weights is on its way"):
                llm._service.client.call("begin_update", engine=0).result()
            with pytest.raises(ValidationError, match="resume comes at the end of the update_weights"):
                llm.resume()
        ask(llm, range(4), 12)
        llm._service.client.call("begin_update", engine=0).result()


async def test_pause_of_an_async_llm(start: Start) -> None:
    with start(2) as llm:
        async with AsyncLLM.connect(llm.runtime_dir) as client:
            await client.pause()
            await client.resume()
            with pytest.raises(ValidationError, match="pause takes none"):
                await asyncio.wrap_future(client._service.client.call("pause", {"now": True}))


def test_lockstep_is_refused_alone(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="dp_lockstep needs a data_parallel_size of 2 to 256; data_parallel_size is 1"
    ):
        LLM("scripted:", dp_lockstep=True)
    with LLM("scripted:", skip_tokenizer_init=True) as llm, pytest.raises(NotSupportedError, match="dp_lockstep"):
        llm.pause()
