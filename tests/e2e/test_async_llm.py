"""AsyncLLM on an engine process: streams, cancellation at every await, notifiers, aborts."""

from __future__ import annotations

import asyncio
import json
import time
from collections import UserDict
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.e2e.conftest import HELLO
from tests.support.chat_templates import DIVIDES, HANGS, template_processes

from wavecore import (
    LLM,
    AsyncLLM,
    EngineDead,
    NotSupportedError,
    OutputKind,
    RequestOutput,
    RequestTimeout,
    ResourceError,
    SamplingParams,
    ValidationError,
    WavecoreError,
    connect,
)
from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.frontend.client.mailbox import Mailbox
from wavecore.frontend.prompts import Prompt
from wavecore.frontend.text import template_process
from wavecore.frontend.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(hello_model: dict[str, str]) -> AsyncIterator[AsyncLLM]:
    llm = await AsyncLLM.start(**hello_model, max_num_seqs=16)
    yield llm
    await asyncio.to_thread(llm.shutdown)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def text_of(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY, **options: Any) -> str:
    return "".join([o.outputs[0].text async for o in llm.generate(prompt, params, **options)])


async def texts_of(outputs: AsyncIterator[RequestOutput]) -> list[str]:
    return [output.outputs[0].text async for output in outputs]


async def test_streams_side_by_side(llm: AsyncLLM) -> None:
    texts = await asyncio.gather(*[text_of(llm, [HELLO, i + 1]) for i in range(30)])
    assert texts == ["Hello world"] * 30
    assert llm.num_unfinished == 0


async def test_output_kinds(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, seed=1)
    whole = [o async for o in llm.generate([HELLO], params, output_kind="cumulative")]
    assert all(b.outputs[0].text.startswith(a.outputs[0].text) for a, b in pairwise(whole))
    assert whole[-1].outputs[0].text == "Hello world"
    [final] = [o async for o in llm.generate([HELLO], params, output_kind=OutputKind.FINAL)]
    assert final.outputs[0] == whole[-1].outputs[0]
    with pytest.raises(ValidationError, match="output_kind"):
        await text_of(llm, [HELLO], output_kind="nothing")


async def test_slow_reader_gets_merged_deltas(llm: AsyncLLM) -> None:
    stream = llm.generate([9, 9], LONG)
    first = await anext(stream)
    while llm.num_unfinished:  # the request ends in the engine while nobody reads
        await asyncio.sleep(0.01)
    rest = [o async for o in stream]
    assert len(rest) == 1
    assert len(first.outputs[0].token_ids) + len(rest[0].outputs[0].token_ids) == 200


async def test_chat_and_embed_and_cache(llm: AsyncLLM) -> None:
    outputs = [o async for o in llm.chat([{"role": "user", "content": "hi"}], GREEDY, "my id")]
    assert outputs[-1].finished
    assert {o.request_id for o in outputs} == {"my id"}
    embedding = (await llm.embed([5, 6])).outputs.embedding
    assert embedding.shape == (8,)
    assert await llm.reset_prefix_cache()
    await llm.check_health()
    assert (await llm.get_tokenizer()).vocab_size > 400


async def test_a_hostile_template_disturbs_nobody(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_SECONDS", 60)
    messages = [{"role": "user", "content": "hi"}]
    hostile = [asyncio.create_task(texts_of(llm.chat(messages, chat_template=source))) for source in (HANGS, DIVIDES)]
    await asyncio.sleep(0)
    assert await text_of(llm, [HELLO]) == "Hello world"
    assert await texts_of(llm.chat(messages, GREEDY))
    assert not any(task.done() for task in hostile)
    for process in template_processes():
        process.kill()
    for task in hostile:
        with pytest.raises((ValidationError, ResourceError), match=r"crashed|did not start"):
            await task


async def test_every_chat_that_fails_ends(llm: AsyncLLM) -> None:
    class Strange(UserDict[str, Any]):
        def keys(self) -> Any:
            raise StopIteration  # which no future may carry

    everything = "".join(map(chr, range(0xF0000, 0x110000)))
    with pytest.raises(ValidationError, match="private use"):
        await texts_of(llm.chat([{"role": "user", "content": everything}]))
    with pytest.raises(WavecoreError, match="StopIteration"):
        await texts_of(llm.chat([Strange(role="user", content="x")]))


async def test_making_a_prompt_counts_for_its_deadline(llm: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestTimeout, match=r"the deadline of 0\.1 s passed while the prompt was made"):
        await texts_of(llm.chat(messages, GREEDY, timeout=60, first_token_timeout=0.1, chat_template=HANGS))
    prompt = replace(llm._service.encode(Prompt("The capital")), seconds=5.0)
    options = RequestOptions(timeout=60.0, queue_timeout=5.0)
    request = llm._service.prepare(prompt, GREEDY, options)
    assert (request.options.timeout, request.options.queue_timeout) == (55.0, 0.001)


async def test_a_text_that_is_certainly_too_long_is_not_encoded(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "_encode", None)
    with pytest.raises(ValidationError, match="prompt: 20000000 characters are more than max_model_len 256"):
        await text_of(llm, "word " * 4_000_000)


async def test_abort_by_id(llm: AsyncLLM) -> None:
    outputs = []
    async for output in llm.generate([9, 9], LONG, "to abort"):
        outputs.append(output)
        await llm.abort("to abort")
        await llm.abort("unknown")
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert llm.num_unfinished == 0


async def test_ids_of_running_requests_are_unique(llm: AsyncLLM) -> None:
    first = llm.generate([9, 9], LONG, "mine")
    await anext(first)
    with pytest.raises(ValidationError, match="request_id"):
        await text_of(llm, [9, 9], request_id="mine")
    await first.aclose()
    assert await text_of(llm, [HELLO], request_id="mine") == "Hello world"
    for wrong in (["a"], "", 5, "x" * 2000):
        with pytest.raises(ValidationError, match="request_id"):
            await text_of(llm, [HELLO], request_id=wrong)


async def test_cancel_at_every_moment(llm: AsyncLLM) -> None:
    """Cancelled after 0, 1, 2, ... turns of the loop: nothing of the request stays, here or in the engine."""
    for turns in range(40):
        task = asyncio.create_task(text_of(llm, [9, turns + 1], LONG))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert llm.num_unfinished == 0
    assert not llm._by_id
    assert all(not notifier._watchers for notifier in llm._notifiers.values())
    assert await text_of(llm, [HELLO]) == "Hello world"
    answer = await asyncio.wrap_future(llm._service.client.call("debug_requests"))
    assert answer.value == []


async def test_cancel_a_final_request_and_an_embedding(llm: AsyncLLM) -> None:
    for make in (lambda: text_of(llm, [9, 9], LONG, output_kind="final"), lambda: llm.embed([5] * 200)):
        task: asyncio.Task[Any] = asyncio.create_task(make())
        await asyncio.sleep(0)  # it is sent; its answer, however fast, needs another turn of the loop
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert llm.num_unfinished == 0


async def test_validation_comes_before_anything_is_sent(llm: AsyncLLM) -> None:
    for prompt in ("", [], {"prompt_token_ids": [512]}):
        with pytest.raises(ValidationError):
            await text_of(llm, prompt)
    assert llm.num_unfinished == 0


async def test_long_text_is_encoded_beside_the_loop(llm: AsyncLLM) -> None:
    with pytest.raises(ValidationError, match="max_model_len"):
        await text_of(llm, "word " * 8_000)
    with pytest.raises(ValidationError, match="Unicode"):
        await text_of(llm, "\ud800")


async def test_timeout_ends_with_what_there_is(llm: AsyncLLM) -> None:
    [output] = [o async for o in llm.generate([9, 9], LONG, timeout=0.1, output_kind="final")]
    assert output.outputs[0].finish_reason == "timeout"
    assert len(output.outputs[0].token_ids) < 200


async def test_clients_attach_and_leave(llm: AsyncLLM) -> None:
    for _ in range(3):
        async with AsyncLLM.connect(llm.runtime_dir) as other:
            assert await text_of(other, [HELLO]) == "Hello world"
    with connect(llm.runtime_dir) as sync:
        assert sync.generate([HELLO], GREEDY, use_tqdm=False)[0].outputs[0].text == "Hello world"


async def test_two_event_loops_share_one_client(llm: AsyncLLM) -> None:
    assert await asyncio.to_thread(lambda: asyncio.run(text_of(llm, [HELLO]))) == "Hello world"
    assert await text_of(llm, [HELLO]) == "Hello world"


async def test_prompt_embeds(llm: AsyncLLM) -> None:
    hidden = int(llm._service.resolved["hidden_size"])
    good = {"prompt_embeds": np.ones((3, hidden), np.float32)}
    outputs = [o async for o in llm.generate(good, GREEDY)]
    assert outputs[-1].finished
    bad: list[Any] = [
        np.ones((3, hidden + 1), np.float32),
        np.ones(hidden, np.float32),
        np.ones((0, hidden), np.float32),
        np.full((3, hidden), np.nan, np.float32),
        np.ones((3, hidden), np.int64),
        "text",
    ]
    for embeds in bad:
        with pytest.raises(ValidationError, match="prompt_embeds"):
            await text_of(llm, {"prompt_embeds": embeds})


async def test_attach_to_nothing(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no deployment"):
        connect(tmp_path)
    assert issubclass(RequestTimeout, TimeoutError)


async def test_a_chat_after_shutdown_is_a_typed_error(hello_model: dict[str, str]) -> None:
    """And so is one that shutdown finds at work."""
    before = set(template_processes())  # those of other tests' tokenizers
    llm = await AsyncLLM.start(**hello_model)
    messages = [{"role": "user", "content": "hi"}]
    await texts_of(llm.chat(messages, GREEDY))
    running = asyncio.create_task(texts_of(llm.chat(messages, GREEDY, chat_template=HANGS)))
    while len(set(template_processes()) - before) < 2:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(llm.shutdown)
    with pytest.raises(EngineDead):
        await texts_of(llm.chat(messages, GREEDY))
    with pytest.raises((ValidationError, ResourceError), match=r"crashed|did not start"):
        await running
    assert not set(template_processes()) - before


async def test_looks_into_the_engine(llm: AsyncLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The methods of `LLM`, as coroutines."""
    stream = llm.generate([9, 8, 7], LONG)
    await anext(stream)
    [row] = await llm.debug_requests()
    assert (row["state"], row["prompt_tokens"]) == ("running", 3)
    assert len(row["last_token_ids"]) == min(10, 3 + row["output_tokens"])
    assert await llm.debug_sequence_states()
    await stream.aclose()
    assert (await llm.step_stats())[0]["steps"] > 0
    await llm.print_memory_stats()
    assert "process" in capsys.readouterr().out
    trace = await llm.export_trace(tmp_path / "trace.json")
    assert trace["traceEvents"] == json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    with pytest.raises(NotSupportedError, match="nothing that could be profiled"):
        await llm.start_profile()
    with pytest.raises(NotSupportedError, match="no attention"):
        await llm.visualize_attention([5], 0, 0, tmp_path / "x.png")
    assert AsyncLLM.debug_requests.__doc__ == LLM.debug_requests.__doc__


@pytest.mark.slow
async def test_a_client_slower_than_its_log_probabilities_loses_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 MB of them, of which the engine may hold 256 MB for a client; other streams go on meanwhile."""
    deliver = Mailbox.deliver

    def slow(self: Mailbox, *row: Any) -> bool:
        time.sleep(0.02 * bool(self.request.params.logprobs))
        return deliver(self, *row)

    async def count(llm: AsyncLLM, **asked: Any) -> int:
        found = 0
        async for output in llm.generate([5], SamplingParams(max_tokens=42, ignore_eos=True, **asked)):
            positions = output.outputs[0].logprobs or ()
            assert len(positions) == (len(output.outputs[0].token_ids) if asked else 0)
            found += len(output.outputs[0].token_ids)
        return found

    monkeypatch.setattr(Mailbox, "deliver", slow)
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"vocab_size": 150_000}))
    async with AsyncLLM(f"scripted:{script}", max_logprobs=-1) as llm:
        found = await asyncio.gather(*[count(llm, logprobs=-1) for _ in range(8)], count(llm))
    assert found == [42] * 9
