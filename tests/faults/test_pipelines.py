"""An engine of a pipeline of several models ends, or does not answer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.scripted_model import EOS, ids_of, write_model
from tests.support.waiting import until

from wavecore import LLM, ModelPipeline, connect
from wavecore.frontend.pipeline import StageOutput
from wavecore.transport.errors import EngineDead, NumericalError, WavecoreError
from wavecore.transport.processes.deployment import EngineEntry, read

STAGES = ("draft", "rewrite", "check")


class Run:
    """One stream of a pipeline, read in a thread of its own."""

    def __init__(self, pipeline: ModelPipeline, prompt: str, max_tokens: int) -> None:
        self.texts = dict.fromkeys(STAGES, "")
        self.ends: list[WavecoreError | StageOutput] = []
        self._thread = threading.Thread(target=self._read, args=(pipeline, prompt, max_tokens), daemon=True)
        self._thread.start()

    @property
    def end(self) -> WavecoreError | StageOutput:
        """Every run ends, once, in bounded time."""
        self._thread.join(60)
        assert len(self.ends) == 1, self.ends
        return self.ends[0]

    def _read(self, pipeline: ModelPipeline, prompt: str, max_tokens: int) -> None:
        try:
            last = StageOutput("none")
            for last in pipeline.stream(prompt, max_tokens=max_tokens, temperature=0.0):
                self.texts[last.stage] += last.text
            self.ends.append(last)
        except WavecoreError as error:
            self.ends.append(error)


@contextmanager
def pipeline_of(folder: Path, **scripts: dict[str, Any]) -> Iterator[ModelPipeline]:
    """Three models that answer by a rule, without end, where their `scripts` say nothing else."""
    pipeline = ModelPipeline()
    for name in STAGES:
        (folder / name).mkdir()
        options: dict[str, Any] = {"step_seconds": 0.005, "max_model_len": 4096, "eos_token_id": []}
        pipeline.add_stage(name, **write_model(folder / name, **(options | scripts.get(name, {}))))
    with pipeline:
        yield pipeline
        assert pipeline.runtime_dir
        for name in STAGES:
            with connect(pipeline.runtime_dir, stage=name) as llm:
                until(lambda llm=llm: idle(llm))


def idle(llm: LLM) -> bool:
    """Its engine holds nothing."""
    [stats] = llm.step_stats()
    return bool(stats["running"] == stats["waiting"] == stats["cache_usage"] == 0)


def engine(pipeline: ModelPipeline, stage: str) -> EngineEntry:
    assert pipeline.runtime_dir
    return next(entry for entry in read(pipeline.runtime_dir).engines if entry.stage == stage)


def test_a_stage_killed_mid_stream(tmp_path: Path) -> None:
    """The engine of one stage of a pipeline is killed while it streams.

    The runs that it streams end within a second with `EngineDead`, which names the stage and the signal; nothing of
    them runs on in other stages. Runs in earlier stages go on, and the engine is started again for them.
    """
    with pipeline_of(tmp_path, draft={"eos_token_id": EOS, "scripts": {"*": ids_of("A draft")}}) as pipeline:
        before = engine(pipeline, "rewrite")
        streaming = [Run(pipeline, f"run {number}", 2000) for number in range(4)]
        until(lambda: all(run.texts["rewrite"] for run in streaming))
        os.kill(before.pid, signal.SIGKILL)
        early = Run(pipeline, "begun while it is down", 20)
        for run in streaming:
            assert isinstance(run.end, EngineDead)
            assert str(run.end).startswith("stage rewrite: engine 1 (stage rewrite) ")
            assert "signal 9 (SIGKILL)" in str(run.end)
            assert run.texts["draft"].startswith("A draft") and not run.texts["check"]
        assert isinstance(early.end, StageOutput)
        assert (early.end.stage, early.end.finish_reason) == ("check", "length")
        after = engine(pipeline, "rewrite")
        assert (after.restarts, after.input) == (1, before.input)
        assert [engine(pipeline, name).restarts for name in STAGES] == [0, 1, 0]


@pytest.mark.slow
def test_a_request_that_fails_in_a_later_stage(tmp_path: Path) -> None:
    """A request of a pipeline fails in one stage: its logits hold NaN, say.

    Its run ends with that error, which names the stage, and what earlier stages wrote was given. Other runs go on.
    """
    bad, good = ids_of("bad")[0], ids_of("good")[0]
    copies = {str(bad): ids_of("bad"), str(good): ids_of("good")}
    with pipeline_of(
        tmp_path,
        draft={"eos_token_id": EOS, "scripts": copies},
        rewrite={"faults": {"nan_token": bad}},
    ) as pipeline:
        runs = {prompt: Run(pipeline, prompt, 30) for prompt in ("bad", "good")}
        failed, finished = runs["bad"].end, runs["good"].end
        assert isinstance(failed, NumericalError) and str(failed).startswith("stage rewrite: ")
        assert runs["bad"].texts["draft"].startswith("bad")
        assert isinstance(finished, StageOutput) and finished.finish_reason == "length"
