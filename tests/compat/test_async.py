"""vLLM's asyncio classes: kinds of streams, aborts, facts that servers ask for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from wavecore import EngineDead, NotSupportedError, ValidationError
from wavecore.vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from wavecore.vllm.sampling_params import RequestOutputKind
from wavecore.vllm.usage.usage_lib import UsageContext
from wavecore.vllm.v1.engine.async_llm import AsyncLLM

PROMPT = [5, 6, 7, 8]
SETTINGS = {"dtype": "float32", "max_num_seqs": 16, "kv_cache_memory_gib": 0.05, "use_tqdm_on_load": False}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(tiny_llama: Path) -> AsyncIterator[AsyncLLM]:
    args = AsyncEngineArgs(model=str(tiny_llama), enable_log_requests=False, max_logprobs=-1, **SETTINGS)
    made = AsyncLLM.from_engine_args(args, usage_context=UsageContext.API_SERVER)
    yield made
    made.shutdown()


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **values})


async def collect(stream: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) async for output in stream]


async def test_a_stream_gives_all_so_far_unless_it_is_asked_for_less(llm: AsyncLLM) -> None:
    whole = await collect(llm.generate(PROMPT, greedy(), "1"))
    assert whole[-1][: len(whole[0])] == whole[0] and len(whole[-1]) == 8
    assert all(a == b[: len(a)] for a, b in pairwise(whole))
    parts = await collect(llm.generate(PROMPT, greedy(output_kind=RequestOutputKind.DELTA), "2"))
    assert [token for part in parts for token in part] == whole[-1]
    final = await collect(llm.generate(PROMPT, greedy(output_kind=RequestOutputKind.FINAL_ONLY), "3"))
    assert final == [whole[-1]]
    explicit = greedy(output_kind=RequestOutputKind.CUMULATIVE)
    assert (await collect(llm.generate(PROMPT, explicit, "4")))[-1] == whole[-1]


async def test_a_stream_with_the_whole_vocabulary_at_each_token(llm: AsyncLLM) -> None:
    for kind, whole in ((RequestOutputKind.CUMULATIVE, True), (RequestOutputKind.DELTA, False)):
        seen: list[int] = []
        async for output in llm.generate(PROMPT, greedy(logprobs=-1, prompt_logprobs=-1, output_kind=kind), str(kind)):
            choice = output.outputs[0]
            seen = list(choice.token_ids) if whole else [*seen, *choice.token_ids]
            assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
            for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
                assert len(position) == 512 and position[token].rank == 1
        assert len(seen) == 8 and output.prompt_logprobs is not None
        assert [position and len(position) for position in output.prompt_logprobs] == [None, 512, 512, 512]


async def test_arguments_of_servers_that_ask_for_nothing(llm: AsyncLLM) -> None:
    nothing = {"lora_request": None, "data_parallel_rank": None, "tokenization_kwargs": None}
    nothing |= {"trace_headers": {"a": "b"}}  # says nothing of the answer
    stream = llm.generate({"prompt_token_ids": PROMPT}, greedy(), "1", prompt_text="shown", priority=0, **nothing)
    [*_, output] = [output async for output in stream]
    assert (output.prompt, output.request_id, output.finished) == ("shown", "1", True)


async def test_a_rank_chooses_the_engine(llm: AsyncLLM) -> None:
    assert await collect(llm.generate(PROMPT, greedy(), "1", data_parallel_rank=0))
    with pytest.raises(ValidationError, match="data_parallel_rank: 1, but there are 1 engines"):
        await collect(llm.generate(PROMPT, greedy(), "1", data_parallel_rank=1))


@pytest.mark.parametrize("name", ["lora_request", "kv_hints", "session_id"])
async def test_arguments_that_ask_for_more_are_refused_by_name(llm: AsyncLLM, name: str) -> None:
    with pytest.raises(NotSupportedError, match=name):
        await collect(llm.generate(PROMPT, greedy(), "1", **{name: "a"}))


@pytest.mark.parametrize("several", [False, True])
async def test_abort(llm: AsyncLLM, several: bool) -> None:
    streams = [llm.generate(PROMPT, greedy(max_tokens=200), name) for name in ("a", "b")]
    for stream in streams:
        await anext(stream)
    await llm.abort(["a", "b", "unknown"] if several else "a")
    if not several:
        await llm.abort("b", internal=False)
    for stream in streams:
        [*_, last] = [output async for output in stream]
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert llm.num_unfinished == 0


async def test_leaving_a_stream_ends_its_request(llm: AsyncLLM) -> None:
    stream = llm.generate(PROMPT, greedy(max_tokens=200), "left")
    await anext(stream)
    await stream.aclose()
    assert llm.num_unfinished == 0
    assert len((await collect(llm.generate(PROMPT, greedy(), "left")))[-1]) == 8  # the id is free again


async def test_a_cancelled_task_ends_its_request(llm: AsyncLLM) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in llm.generate(PROMPT, greedy(max_tokens=200), "cancelled"):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert llm.num_unfinished == 0


async def test_many_at_once_are_what_each_is_alone(llm: AsyncLLM) -> None:
    prompts = [[number, number + 1] for number in range(10, 40)]
    alone = [(await collect(llm.generate(prompt, greedy(), str(prompt))))[-1] for prompt in prompts[:3]]
    together = await asyncio.gather(*[collect(llm.generate(prompt, greedy(), str(prompt))) for prompt in prompts])
    assert [stream[-1] for stream in together[:3]] == alone


async def test_an_added_request_gathers_its_outputs(llm: AsyncLLM) -> None:
    final = greedy(output_kind=RequestOutputKind.FINAL_ONLY)
    first = await llm.add_request("first", PROMPT, final)
    second = await llm.add_request("second", PROMPT, greedy(max_tokens=200), priority=0)
    output = await first.get()
    assert output.finished and len(output.outputs[0].token_ids) == 8
    assert not (await second.get()).finished
    second.close()
    failed = await llm.add_request("failed", [600], final)
    with pytest.raises(ValueError, match="vocabulary"):
        await failed.get()


async def test_facts_that_servers_ask_for(llm: AsyncLLM) -> None:
    assert (llm.is_running, llm.is_stopped, llm.errored, llm.dead_error) == (True, False, False, None)
    assert llm.model_config.max_model_len == llm.vllm_config.model_config.max_model_len == 256
    assert llm.get_num_unfinished_requests() == 0
    assert llm.tokenizer is llm.get_tokenizer()
    assert await llm.is_tracing_enabled() is False
    await llm.check_health()
    await llm.do_log_stats()
    assert await llm.reset_prefix_cache()


@pytest.mark.parametrize("name", ["encode", "sleep", "wake_up", "collective_rpc"])
async def test_methods_that_are_not_here_are_refused_by_name(llm: AsyncLLM, name: str) -> None:
    with pytest.raises(NotSupportedError, match=name):
        getattr(llm, name)


async def test_an_engine_that_was_shut_down_is_errored(tiny_llama: Path) -> None:
    args = AsyncEngineArgs(str(tiny_llama), **SETTINGS)
    llm = AsyncLLMEngine.from_vllm_config(args.create_engine_config())
    llm.shutdown()
    assert llm.errored and llm.is_stopped and isinstance(llm.dead_error, EngineDead)
