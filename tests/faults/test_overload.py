"""More than fits: too many requests, readers that do not read, clients that go away."""

from __future__ import annotations

import contextlib
import random
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.conftest import right_answer
from tests.support.waiting import until

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.llm import LLM
from wavecore.frontend.prompts import as_prompt
from wavecore.transport.errors import Overloaded


def submit(deployed: Any, count: int, max_tokens: int = 5, length: int = 3) -> tuple[ThreadNotifier, set[Mailbox]]:
    """Many requests without a thread each."""
    service, notifier = deployed.llm._service, ThreadNotifier()
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    boxes = set()
    for i in range(count):
        prompt = as_prompt({"prompt_token_ids": [i % 900 + 1] * length})
        mailbox = service.mailbox(service.prepare(prompt, params), notifier, OutputKind.FINAL)
        service.client.submit(mailbox)
        boxes.add(mailbox)
    return notifier, boxes


def ends(notifier: ThreadNotifier, boxes: set[Mailbox]) -> list[Any]:
    """The final output of each, each exactly once."""
    left, outputs = set(boxes), []
    while left:
        mailbox = notifier.wait(30)
        assert mailbox in left, "nothing, or an end for the second time"
        left.remove(mailbox)
        outputs.append(mailbox.take())
    assert notifier.wait(0) is None
    return outputs


def test_more_requests_than_the_queue_takes(deploy: Any) -> None:
    """Ten times more requests arrive than `max_num_queued_reqs` allows.

    Those over the bound are refused with `Overloaded` at once, the others finish; `LLM.generate` waits and sends the
    refused ones again by itself.
    """
    with deploy({"step_seconds": 0.02}, max_num_seqs=8, max_num_queued_reqs=50) as deployed:
        outputs = ends(*submit(deployed, 1000))
        refused = [o for o in outputs if isinstance(o.error, Overloaded)]
        finished = [o for o in outputs if o.error is None]
        assert len(refused) + len(finished) == 1000
        assert 50 <= len(finished) < 500
        assert "max_num_queued_reqs 50" in str(refused[0].error)
        assert not any(o.outputs[0].token_ids for o in refused)
        for output in finished:
            assert output.outputs[0].token_ids == right_answer(output.prompt_token_ids, 5)
        params = SamplingParams(max_tokens=2, temperature=0)
        outputs = deployed.llm.generate([{"prompt_token_ids": [1, 2]}] * 200, params, use_tqdm=False)
        assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 200


def test_aborts_at_any_moment(deploy: Any) -> None:
    """Requests are aborted while they wait, in the middle of their prompt, at their last step, twice, or long after.

    An abort is never an error; every request ends once and all its cache blocks come back.
    """
    with deploy(
        {"step_seconds": 0.004}, max_num_batched_tokens=64, max_num_seqs=8, num_gpu_blocks_override=60
    ) as deployed:
        chance = random.Random(0)
        client = deployed.llm._service.client
        notifier, boxes = submit(deployed, 300, max_tokens=6, length=100)
        order = list(boxes)
        chance.shuffle(order)
        for mailbox in order[:200]:
            client.abort(mailbox)
            if chance.random() < 0.3:
                client.abort(mailbox)
        outputs = ends(notifier, boxes)
        reasons = [o.outputs[0].finish_reason for o in outputs]
        assert reasons.count("abort") > 100
        assert set(reasons) == {"abort", "length"}
        for mailbox in order:
            client.abort(mailbox)
        until(lambda: deployed.call("memory_stats")["blocks_in_use"] == 0)


def test_a_thousand_aborts_at_once(deploy: Any) -> None:
    """A thousand requests are aborted in one go.

    All end; the engine is free for the next request in the next step.
    """
    with deploy({"step_seconds": 0.01}, max_num_seqs=16) as deployed:
        notifier, boxes = submit(deployed, 1000, max_tokens=1000)
        client = deployed.llm._service.client
        for mailbox in boxes:
            client.abort(mailbox)
        assert {o.outputs[0].finish_reason for o in ends(notifier, boxes)} == {"abort"}
        deployed.check_serving()
        assert deployed.call("debug_requests") == []


def test_flood_of_utility_calls(deploy: Any) -> None:
    """A client calls `check_integrity` 400 times at once while another streams and asks for its own statistics.

    Each turn of the loop makes a few calls, of each client in turn: the stream goes on, nobody waits for all of them.
    """
    with (
        deploy({"step_seconds": 0.002, "num_blocks": 20_000}) as deployed,
        LLM.connect(deployed.runtime_dir) as other,
    ):
        stream = deployed.stream(1, 60, llm=other)
        stream.first.wait(30)
        flood = [deployed.llm._service.client.call("check_integrity", timeout=120.0) for _ in range(400)]
        other.step_stats()
        assert not all(future.done() for future in flood)
        stream.check_finished()
        assert not all(future.done() for future in flood)
        assert all(future.result().value for future in flood)
        deployed.check_serving()


def test_more_clients_than_the_engine_has_descriptors(deploy: Any) -> None:
    """Clients attach until the engine's file descriptors run low; its soft limit is that of the system, say 1,024.

    The engine raises the soft limit to the hard one. The first client over it is refused with `Overloaded`, which names
    the limit and the way out; the others stream on, and one that leaves makes room.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
    try:
        deployment = deploy({"step_seconds": 0.01})
        deployed = deployment.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.ExitStack() as stack:
        stack.push(deployment)
        assert resource.prlimit(deployed.engine.pid, resource.RLIMIT_NOFILE)[0] == hard
        used = sum(1 for _ in Path(f"/proc/{deployed.engine.pid}/fd").iterdir())
        limit = (used + 10) * 4 // 3
        resource.prlimit(deployed.engine.pid, resource.RLIMIT_NOFILE, (limit, limit))
        stream = deployed.stream(1, 200)
        others = []
        with pytest.raises(Overloaded, match=f"the engine's {limit} file descriptors are free.*ulimit -Hn"):
            for _ in range(12):
                others.append(stack.enter_context(LLM.connect(deployed.runtime_dir)))
        assert 3 <= len(others) <= 6
        for _ in range(5):
            with pytest.raises(Overloaded):
                LLM.connect(deployed.runtime_dir)
        stream.check_finished()
        deployed.stream(2, 10, llm=others[0]).check_finished()
        others[1].shutdown()
        others[2].shutdown()
        until(lambda: sum(1 for _ in Path(f"/proc/{deployed.engine.pid}/fd").iterdir()) < used + 8)
        stack.enter_context(LLM.connect(deployed.runtime_dir))


def test_consumer_leaves(deploy: Any) -> None:
    """A consumer leaves its stream (a closed browser tab, `break` in a loop) while the request runs or waits.

    The request is aborted in the engine and its blocks are free again.
    """
    with deploy({"step_seconds": 0.005}, max_num_seqs=1) as deployed:
        running = deployed.llm.stream({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=4000, temperature=0))
        next(running)
        waiting = deployed.llm.stream({"prompt_token_ids": [3]}, SamplingParams(max_tokens=4000, temperature=0))
        thread = threading.Thread(target=lambda: next(waiting))
        thread.start()
        until(lambda: deployed.call("stats")["waiting"] == 1)
        running.close()
        thread.join(30)
        waiting.close()
        until(lambda: deployed.call("debug_requests") == [])


def test_large_prompt_does_not_stop_others(deploy: Any) -> None:
    """A prompt of tens of megabytes arrives while others stream.

    It is taken in beside the running steps: the others go on token by token, and it is answered or refused by name.
    """
    length = 3_000_000
    script = {"max_model_len": length + 10, "num_blocks": 5000, "block_size": 1024, "step_seconds": 0.002}
    with deploy(script, max_num_seqs=4, max_num_batched_tokens=2048, enable_prefix_caching=False) as deployed:
        stream = deployed.stream(1, 800)
        assert stream.first.wait(30)
        service = deployed.llm._service
        prompt = np.tile(np.arange(1, 1000, dtype=np.int32), length // 999)
        request = service.prepare(as_prompt({"prompt_token_ids": prompt.tolist()}), SamplingParams(max_tokens=1))
        seen = len(stream.tokens)
        mailbox = service.mailbox(request, ThreadNotifier(), OutputKind.FINAL)
        service.client.submit(mailbox)
        until(lambda: stream.ends or deployed.call("stats")["running"] == 2)
        until(lambda: len(stream.tokens) > seen or stream.ends)
        service.client.abort(mailbox)
        stream.check_finished()
