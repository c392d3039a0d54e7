"""Several engines of one deployment and the clients that share them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.scripted_model import write_model
from tests.support.waiting import until

from wavecore import LLM, SamplingParams, ValidationError, connect
from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import COUNTED_OUTPUT
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.prompts import as_prompt
from wavecore.frontend.vllm.metrics import read_metrics
from wavecore.transport.errors import EngineDead
from wavecore.transport.processes import deployment

SHORT = SamplingParams(temperature=0.0, max_tokens=4)
LONG = SamplingParams(temperature=0.0, max_tokens=100_000)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    script = {"eos_token_id": [], "max_model_len": 200_000, "num_blocks": 40_000, "step_seconds": 0.002}
    model = write_model(tmp_path_factory.mktemp("model"), **script)
    with LLM(**model, data_parallel_size=2, max_num_seqs=2) as llm:
        until(lambda: len(llm._service.client.engines) == 2, "both engines")
        yield llm


def finished(llm: LLM) -> list[int]:
    """Choices that have ended, by engine."""
    return [stats["finished"] for stats in llm.step_stats()]


def ids(count: int) -> list[Any]:
    return [[10 + i, 11] for i in range(count)]


def test_a_batch_is_spread_and_each_answer_is_that_of_its_prompt(llm: LLM) -> None:
    before = finished(llm)
    together = llm.generate(ids(60), SHORT, use_tqdm=False)
    done = [now - then for now, then in zip(finished(llm), before, strict=True)]
    assert sum(done) >= 60 and min(done) >= 24  # one that moved has ended twice
    for rank in (0, 1):
        alone = llm.generate(ids(60)[rank::20], SHORT, use_tqdm=False, data_parallel_rank=rank)
        assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in together[rank::20]]


def test_a_rank_is_the_engine_that_serves(llm: LLM) -> None:
    before = finished(llm)
    llm.generate(ids(6), SHORT, use_tqdm=False, data_parallel_rank=1)
    assert list(llm.stream([5], SHORT, data_parallel_rank=1))[-1].finished
    assert [now - then for now, then in zip(finished(llm), before, strict=True)] == [0, 7]
    with pytest.raises(ValidationError, match="data_parallel_rank: 2, but there are 2 engines"):
        llm.generate([1], SHORT, data_parallel_rank=2)


def submit(llm: LLM, count: int, params: SamplingParams, rank: int | None = None) -> list[Mailbox]:
    service = llm._service
    options = RequestOptions(data_parallel_rank=rank)
    requests = [service.prepare(as_prompt([7 + i]), params, options) for i in range(count)]
    mailboxes = [service.mailbox(request, ThreadNotifier(), OutputKind.CUMULATIVE) for request in requests]
    for mailbox in mailboxes:
        service.client.submit(mailbox)
    return mailboxes


def abort(llm: LLM, mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        llm._service.client.abort(mailbox)


def test_a_client_goes_where_others_are_not(llm: LLM) -> None:
    engines, before = llm._service.client._engines, finished(llm)
    with connect(llm.runtime_dir) as other:
        theirs = submit(other, 2, LONG, rank=0)
        until(lambda: engines[0].other_tokens == 2 * (1 + COUNTED_OUTPUT), "the load of others")
        assert engines[1].other_tokens == 0
        llm.generate(ids(4), SHORT, use_tqdm=False)
        assert [now - then for now, then in zip(finished(llm), before, strict=True)] == [0, 4]
        abort(other, theirs)
        until(lambda: engines[0].other_tokens == 0, "its end")


def test_two_clients_at_once_spread_their_requests(llm: LLM) -> None:
    before = finished(llm)
    with connect(llm.runtime_dir) as other:
        mailboxes = [mailbox for client in (llm, other) for mailbox in submit(client, 30, SHORT)]
        until(lambda: all(mailbox.ended for mailbox in mailboxes), "all ends")
    done = [now - then for now, then in zip(finished(llm), before, strict=True)]
    assert sum(done) >= 60 and min(done) >= 24


def test_what_waits_for_a_busy_engine_moves_when_another_is_free(llm: LLM) -> None:
    """Engine 0 is busy for longer than this test lasts; what waited there ends nevertheless."""
    busy, others = submit(llm, 2, LONG, rank=0), submit(llm, 3, LONG, rank=1)
    until(lambda: all(mailbox.has_tokens for mailbox in [*busy, *others[:2]]), "full engines")
    waiting = submit(llm, 3, SHORT)
    engines = llm._service.client._engines
    until(lambda: set(waiting) <= engines[0].unstarted.keys(), "three in the queue of the first")
    abort(llm, others)
    until(lambda: all(mailbox.ended for mailbox in waiting), "their ends at the second")
    outputs = [mailbox.take() for mailbox in waiting]
    assert all(output is not None and output.outputs[0].finish_reason == "length" for output in outputs)
    assert not any(mailbox.ended for mailbox in busy)
    abort(llm, busy)


def test_what_engines_say_has_their_numbers_also_while_one_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("wavecore.transport.processes.group.Backoff.ended", lambda *_: 600.0)
    model = write_model(tmp_path, eos_token_id=[], step_seconds=0.002, max_model_len=200_000, num_blocks=40_000)
    with LLM(**model, data_parallel_size=2) as llm:
        until(lambda: len(llm.step_stats()) == 2, "both")
        first, second = deployment.read(llm.runtime_dir).engines
        psutil.Process(first.pid).kill()
        until(lambda: llm._service.client.engines == [1], "one")
        [mailbox] = submit(llm, 1, LONG)
        until(lambda: mailbox.has_tokens, "its first token")
        assert [stats["engine"] for stats in llm.step_stats()] == [1]
        assert [row["engine"] for row in llm.debug_requests()] == [1]
        assert {event["pid"] for event in llm.export_trace(tmp_path / "trace.json")["traceEvents"]} == {1}
        assert {metric.labels["engine"] for metric in read_metrics(llm.step_stats())} == {"1"}
        capsys.readouterr()
        llm.print_memory_stats()
        assert capsys.readouterr().out.startswith("engine 1\n")
        psutil.Process(second.pid).kill()
        until(lambda: not llm._service.client.engines, "none")
        for ask in (llm.step_stats, llm.debug_requests, llm.print_memory_stats, llm.reset_prefix_cache):
            with pytest.raises(EngineDead, match="SIGKILL"):
                ask()
